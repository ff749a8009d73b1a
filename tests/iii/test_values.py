"""F2-M4 at the functions' door: a payload of very many values is refused before anything is made of it."""

import json
from typing import Any

import pytest
from lab.functions import FunctionLab


@pytest.mark.parametrize(
    "values", [b"[" + b"[]," * 5_000_000 + b"1]", b"[" * 5_000_000 + b"]" * 5_000_000, b'[{"a":' * 1_000_000]
)
def test_a_payload_of_very_many_values_is_refused(fn: FunctionLab, values: bytes) -> None:
    before = fn.peak_memory()
    answer = send(fn, b'{"sandbox_id":"none","argv":' + values + b"}")
    assert "too many values" in answer["error"]["message"], answer
    assert fn.peak_memory() - before < 128 << 20


def test_a_long_text_is_none(fn: FunctionLab) -> None:
    payload = {"sandbox_id": "none", "path": "/workspace/x", "content": "a,[b," * 200_000, "unknown": 1}
    answer = send(fn, json.dumps(payload).encode(), "sandbox::fs::write")
    assert "too many" not in answer["error"]["message"], answer


def send(fn: FunctionLab, body: bytes, name: str = "sandbox::exec") -> Any:
    return fn.ask("POST", f"/functions/{name}", body)[1]
