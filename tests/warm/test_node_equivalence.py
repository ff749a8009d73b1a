"""A program for Node cannot tell whether its Node was started for it or waited for it."""

from collections.abc import Iterator

import pytest
from lab.node_programs import FILES, LINES, MORE
from lab.sandboxes import Lab
from lab.warmth import cold, sample, told, warm_node

from atoll import ExecResult, Sandbox

ROOM = {"memory_mb": 1024, "pids": 256}
PLACE = "/workspace/equal"
BESIDE = {
    "beside.js": "module.exports = 'beside'\n",
    "equal_child.js": "process.send([process.argv.length, process.execArgv])\n",
}


@pytest.fixture(scope="module")
def place(lab: Lab, runtime: str) -> Iterator[Sandbox]:
    with lab.sandbox(runtime=runtime, **ROOM) as made:
        made.files.mkdir(PLACE)
        for name, text in BESIDE.items():
            made.files.write(f"{PLACE}/{name}", text)
        yield made


def same(lab: Lab, box: Sandbox, argv: list[str], **options: object) -> None:
    found: ExecResult = warm_node(lab, box, argv, **options)
    assert told(found) == told(cold(box, argv, **options)), argv


@pytest.mark.parametrize("at", range(len(LINES)))
def test_a_line_of_code(lab: Lab, runtime: str, place: Sandbox, at: int) -> None:
    sample(runtime, at)
    same(lab, place, ["node", "-e", LINES[at], "first", "-x", "zwei ü"])


@pytest.mark.parametrize("at", range(len(MORE)))
def test_another_line_of_code(lab: Lab, line_place: Sandbox, at: int) -> None:
    same(lab, line_place, ["node", "-e", MORE[at]])


@pytest.mark.parametrize("at", range(0, len(LINES), 2))
def test_a_line_as_a_file_with_input(lab: Lab, line_place: Sandbox, at: int) -> None:
    """As `run` starts code of several lines: a file, and the modules beside the working directory can be found."""
    line_place.files.write("/tmp/equal.js", LINES[at])
    env = {"NODE_PATH": "/workspace/node_modules"}
    same(lab, line_place, ["node", "/tmp/equal.js", "-e", "first"], env=env, stdin="one\ntwo\n")


@pytest.fixture(scope="module")
def line_place(lab: Lab) -> Iterator[Sandbox]:
    with lab.sandbox(runtime="container", **ROOM) as made:
        yield made


@pytest.mark.parametrize("at", range(len(FILES)))
def test_a_file(lab: Lab, runtime: str, place: Sandbox, at: int) -> None:
    sample(runtime, at)
    suffix, text = FILES[at]
    place.files.write(f"{PLACE}/equal{suffix}", text)
    same(lab, place, ["node", f"equal{suffix}", "first"], cwd=PLACE)


@pytest.mark.parametrize("options", [
    {"stdin": "one\ntwo\n"}, {"stdin": b"\xff\xfe"}, {"stdin": ""}, {"cwd": "/usr"}, {"umask": 0o77}, {"stdin": "x" * 500_000},
    {"env": {"PLAIN": "x", "EMPTY": "", "PWD": "/elsewhere", "PATH": "/usr/bin:/bin", "HOME": "/tmp", "NO_COLOR": "1"}},
])  # fmt: skip
def test_what_is_asked_of_a_run(lab: Lab, place: Sandbox, options: dict[str, object]) -> None:
    code = (
        "const fs = require('fs'); console.log(process.cwd(), process.umask(), process.env, require('module').globalPaths,"
        " require('crypto').createHash('md5').update(fs.readFileSync(0)).digest('hex'));"
        " console.log(require('child_process').execSync('env; pwd; umask').toString())"
    )
    same(lab, place, ["node", "-e", code], **options)


def test_what_should_be_random_is(lab: Lab, place: Sandbox) -> None:
    code = "const c = require('crypto'); console.log(Math.random(), c.randomUUID(), c.randomBytes(8).toString('hex'))"
    seen = [warm_node(lab, place, ["node", "-e", code]).stdout.split() for _ in range(3)]
    assert all(len(set(column)) == 3 for column in zip(*seen, strict=True)), seen
