"""A program cannot tell whether the interpreter that runs it was started for it or waited for it."""

import pytest
from lab.sandboxes import Lab
from lab.warm_programs import FILES, LINES
from lab.warmth import cold, sample, told, warm

from atoll import Sandbox

SCRIPT = "/tmp/_k8e_run_equal.py"


@pytest.mark.parametrize("at", range(len(LINES)))
def test_a_line_of_code(lab: Lab, runtime: str, anywhere: Sandbox, at: int) -> None:
    sample(runtime, at)
    argv = ["python3", "-c", LINES[at], "first", "zwei ü"]
    assert told(warm(lab, anywhere, argv)) == told(cold(anywhere, argv)), LINES[at]


@pytest.mark.parametrize("at", range(len(FILES)))
def test_a_file(lab: Lab, runtime: str, anywhere: Sandbox, at: int) -> None:
    """As `run` starts code of several lines: a file, and the modules beside the working directory can be found."""
    sample(runtime, at)
    anywhere.files.write(SCRIPT, FILES[at])
    argv, env = ["python3", SCRIPT, "first"], {"PYTHONPATH": "/workspace"}
    assert told(warm(lab, anywhere, argv, env=env)) == told(cold(anywhere, argv, env=env)), FILES[at]


@pytest.mark.parametrize("options", [
    {"stdin": "one\ntwo\n"}, {"stdin": b"\xff\xfe"}, {"stdin": ""}, {"cwd": "/usr"}, {"umask": 0o77},
    {"env": {"PLAIN": "x", "EMPTY": "", "PWD": "/elsewhere", "PATH": "/usr/bin:/bin"}},
])  # fmt: skip
def test_what_is_asked_of_a_run(lab: Lab, anywhere: Sandbox, options: dict[str, object]) -> None:
    code = (
        "import os, sys; print(sys.stdin, sys.stdin.seekable(), sys.stdin.isatty(), os.getcwd(), oct(os.umask(0)),"
        " list(os.environ.items())); print(ascii(sys.stdin.buffer.read())); os.system('env')"
    )
    argv = ["python3", "-c", code]
    assert told(warm(lab, anywhere, argv, **options)) == told(cold(anywhere, argv, **options))


def test_what_should_be_random_is(lab: Lab, anywhere: Sandbox) -> None:
    code = "import random, uuid, secrets, tempfile; print(random.random(), uuid.uuid4(), uuid.uuid1(), secrets.token_hex())"
    seen = [warm(lab, anywhere, ["python3", "-c", code]).stdout.split() for _ in range(3)]
    assert all(len(set(column)) == 3 for column in zip(*seen, strict=True)), seen
