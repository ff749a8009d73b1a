"""Fixes of errors: each is merged into the request as the contract says, and the merged request succeeds."""

from typing import Any

import pytest
from lab.functions import FunctionLab

CREATE = [
    {"image": "nope"},
    {"image": "pyhton"},
    {"image": "docker.io/library/node:20-alpine"},
    {"image": "python3"},
    {},
    {"image": "python", "cpus": 0},
    {"image": "python", "cpus": "1"},
    {"image": "python", "memory_mb": 8},
    {"image": "python", "memory_mb": "256"},
    {"image": "python", "memory_mb": 256.0},
    {"image": "python", "idle_timeout_secs": -1},
    {"image": "python", "network": "false"},
    {"image": "python", "name": 7},
    {"image": "python", "env": {"A": 1}},
    {"image": "python", "env": ["A=1", "B"]},
    {"image": "python", "env": "A=1"},
    {"image": "python", "env": None},
]
EXEC = [
    {"cmd": "echo a b", "args": ["c"]},
    {"cmd": "echo", "argv": ["echo", "x"]},
    {"cmd": "echo 'x"},
    {"argv": ["", "true"]},
    {"cmd": "echo", "args": "x"},
    {"cmd": "cat", "stdin": "plain text"},
    {"cmd": "true", "timeout_ms": "5000"},
    {"cmd": "true", "timeout_ms": -1},
    {"cmd": "true", "env": {"1A": "x", "B": "y"}},
]
RUN = [
    {"image": "nope", "lang": "python", "code": "print(1)"},
    {"image": "nope", "lang": "node", "code": "console.log(1)"},
    {"image": "python", "code": "print(1)"},
    {"image": "python", "lang": "", "code": "print(1)"},
    {"lang": "python", "code": "print(1)"},
    {"image": "python", "lang": "python", "code": "print(1)", "keep_sandbox": "false"},
    {"image": "python", "lang": "python", "code": "print(1)", "args": [1]},
]
FILES = [
    ("mkdir", {"path": "/tmp/d", "mode": "rwx"}),
    ("mkdir", {"path": "/tmp/deep/er/d"}),
    ("mkdir", {"path": "/tmp"}),
    ("write", {"path": "/tmp/w", "content": "x", "mode": 644}),
    ("write", {"path": "/tmp/w", "content": "x", "mode": "0o644"}),
    ("write", {"path": "/tmp/w", "content": "x", "content_b64": "eA=="}),
    ("write", {"path": "/tmp/w", "content_b64": "not base64!"}),
    ("write", {"path": "/tmp/missing/w", "content": "x"}),
    ("chmod", {"path": "/tmp/f", "mode": 600}),
    ("grep", {"path": "/tmp", "pattern": "a(b"}),
    ("grep", {"path": "/tmp", "pattern": "x", "recursive": False}),
    ("grep", {"path": "/tmp", "pattern": "x", "include_glob": ["!*.c"]}),
    ("grep", {"path": "/tmp", "pattern": "x", "max_matches": -1}),
    ("sed", {"files": ["/tmp/f"], "path": "/tmp", "pattern": "q", "replacement": "q"}),
    ("sed", {"files": ["/tmp/f"], "pattern": "q(", "replacement": "q"}),
]


def mend(fn: FunctionLab, name: str, fields: dict[str, Any]) -> tuple[dict[str, Any], Any]:
    refused = fn.refused(name, fields)
    assert isinstance(refused.fix, dict), refused.all
    return refused.fix, fn(name, {**fields, **refused.fix})


@pytest.mark.parametrize("fields", CREATE, ids=str)
def test_everyday_10_a_fix_of_create_succeeds(fn: FunctionLab, fields: dict[str, Any]) -> None:
    fix, made = mend(fn, "sandbox::create", fields)
    fn("sandbox::stop", sandbox_id=made["sandbox_id"])
    assert set(fix) <= {"image", *fields}


@pytest.mark.parametrize("fields", EXEC, ids=str)
def test_everyday_10_a_fix_of_exec_succeeds(fn: FunctionLab, box: str, fields: dict[str, Any]) -> None:
    _, done = mend(fn, "sandbox::exec", {"sandbox_id": box, **fields})
    assert done["exit_code"] == 0
    if "stdin" in fields:
        assert done["stdout"] == fields["stdin"]


@pytest.mark.parametrize("fields", RUN, ids=str)
def test_everyday_10_a_fix_of_run_succeeds(fn: FunctionLab, fields: dict[str, Any]) -> None:
    _, done = mend(fn, "sandbox::run", fields)
    assert done["stdout"] == "1\n"


@pytest.mark.parametrize(("name", "fields"), FILES, ids=str)
def test_everyday_10_a_fix_of_a_file_function_succeeds(
    fn: FunctionLab, box: str, name: str, fields: dict[str, Any]
) -> None:
    fn.sh(box, "rm -rf /tmp/*; echo q > /tmp/f")
    mend(fn, f"sandbox::fs::{name}", {"sandbox_id": box, **fields})


def test_everyday_10_the_nearest_image_is_named(fn: FunctionLab) -> None:
    wanted = {
        "pyhton": "python",
        "nodejs": "node",
        "docker.io/library/node:20": "node",
        "nope": "node",
        "xyz": "python",
    }
    found = {name: fn.refused("sandbox::create", image=name).fix for name in wanted}
    assert found == {name: {"image": image} for name, image in wanted.items()}


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("sandbox::fs::rm", {"path": "/tmp/full"}),
        ("sandbox::fs::mv", {"src": "/tmp/f", "dst": "/tmp/g"}),
        ("sandbox::fs::sed", {"path": "/tmp", "recursive": False, "pattern": "q", "replacement": "z"}),
        ("sandbox::fs::mkdir", {"path": "/tmp/f"}),
        ("sandbox::exec", {"cmd": " "}),
        ("sandbox::fs::write", {"path": "/tmp/f"}),
    ],
    ids=str,
)
def test_everyday_10_nothing_destructive_or_guessed_is_offered(
    fn: FunctionLab, box: str, name: str, fields: dict[str, Any]
) -> None:
    fn.sh(box, "rm -rf /tmp/*; echo q > /tmp/f; echo g > /tmp/g; mkdir /tmp/full; touch /tmp/full/x")
    assert fn.refused(name, {"sandbox_id": box, **fields}).fix is None


def test_everyday_10_caps_are_a_fix(own_fn: FunctionLab) -> None:
    own_fn.configure(per_image_caps={"python": {"max_cpus": 1, "max_memory_mb": 128}})
    fix, made = mend(own_fn, "sandbox::create", {"image": "python", "cpus": 4, "memory_mb": 4096})
    assert fix == {"cpus": 1, "memory_mb": 128}
    own_fn("sandbox::stop", sandbox_id=made["sandbox_id"])


def test_everyday_10_run_answers_with_its_sandbox_id(fn: FunctionLab) -> None:
    done = fn("sandbox::run", image="python", lang="python", code="print(1)")
    assert len(done["sandbox_id"]) == 36
    assert fn.refused("sandbox::exec", sandbox_id=done["sandbox_id"], cmd="true").code == "S004"
