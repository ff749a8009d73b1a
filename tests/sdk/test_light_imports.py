"""The hot path stays light: what `sandbox run` imports decides how fast atoll feels."""

import os
import subprocess
import sys

import pytest

import atoll

from .scripted import answer, replies, scripted

SOURCE = os.path.dirname(os.path.dirname(os.path.abspath(atoll.__file__)))
HEAVY = {
    "argparse", "asyncio", "dataclasses", "typing", "msgspec", "http.client", "subprocess", "json", "re", "enum", "socket",
    "signal", "threading", "collections", "inspect", "logging", "tempfile", "tarfile", "contextlib", "functools",
}  # fmt: skip

RUN = b'{"command_id":"c1","sandbox_id":"s1","status":"completed","exit_code":7,"stdout":"hi\\n","stderr":""}'
PROGRAM = """
import sys
before = set(sys.modules)
from atoll.cli import main
code = main()
sys.stderr.write("\\n".join(sorted(set(sys.modules) - before)))
sys.exit(code)
"""


@pytest.mark.parametrize("extra", [[], ["--raw"]])
def test_run_imports_nothing_heavy(extra: list[str]) -> None:
    if extra:
        frame = b"\x01\0\0\0\x03hi\n" + b"\x04" + len(RUN).to_bytes(4, "big") + RUN
        reply = answer(frame)
    else:
        reply = answer(RUN)
    with scripted(replies([], reply)) as server:
        done = subprocess.run(
            [sys.executable, "-S", "-c", PROGRAM, "sandbox", "run", "exit 7", "--session-id", "s1", *extra],
            env={**os.environ, "PYTHONPATH": SOURCE, "ATOLL_ENDPOINT": f"unix:{server.path}"},
            capture_output=True,
            text=True,
            timeout=60,
        )
    assert done.returncode == 7, done.stderr
    assert "hi" in done.stdout
    loaded = set(done.stderr.split("\n"))
    assert not loaded & HEAVY
    assert len(loaded) <= 40, sorted(
        loaded
    )  # the table of verbs is in more than one file, K8E's words in four small ones


def test_import_atoll_is_light() -> None:
    probe = "import sys; b=set(sys.modules); import atoll; print(len(set(sys.modules)-b))"
    done = subprocess.run(
        [sys.executable, "-S", "-c", probe], env={**os.environ, "PYTHONPATH": SOURCE}, capture_output=True, timeout=60
    )
    assert int(done.stdout) <= 2
