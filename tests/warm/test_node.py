"""When a Node that waits serves, when it must not, what it may cost, and that nothing done to it costs more than a head start."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from lab.sandboxes import HELD, NO_SPARES, PATIENCE, Lab, until
from lab.warmth import heat_node, node_counts, warm_node

from atoll import Sandbox

ROOM = {"memory_mb": 512, "pids": 256}
TREE = """
const { spawn } = require('child_process')
for (let n = 0; n < 2; n++) spawn('sh', ['-c', 'setsid sleep 1000 & sleep 1000'], { stdio: 'ignore', detached: true })
console.log('up')
setInterval(() => {}, 1000)
"""


@pytest.fixture(scope="module")
def roomy(lab: Lab, runtime: str) -> Iterator[Sandbox]:
    with lab.sandbox(runtime=runtime, **ROOM) as made:
        yield made


@pytest.fixture
def box(lab: Lab) -> Iterator[Sandbox]:
    with lab.sandbox(runtime="container", **ROOM) as made:
        yield made


def test_run_is_served(lab: Lab, roomy: Sandbox) -> None:
    heat_node(lab, roomy)
    before = node_counts(lab, roomy)["hits"]
    assert roomy.run("console.log(6 * 7)", language="node").stdout == "42\n"
    heat_node(lab, roomy)
    found = roomy.run("\nconsole.log(__filename.slice(0, 14), require('module').globalPaths[0])", language="node")
    assert found.stdout == "/tmp/_k8e_run_ /workspace/node_modules\n"
    assert node_counts(lab, roomy)["hits"] == before + 2


def test_modules_that_came_later_are_seen(lab: Lab, roomy: Sandbox) -> None:
    heat_node(lab, roomy)
    roomy.files.mkdir("/workspace/node_modules/late")
    roomy.files.write("/workspace/node_modules/late/package.json", '{"name": "late", "main": "m.js"}')
    for text in ("one", "two"):
        roomy.files.write("/workspace/node_modules/late/m.js", f"module.exports = '{text}'\n")
        assert warm_node(lab, roomy, ["node", "-e", "console.log(require('late'))"]).stdout == f"{text}\n"
        heat_node(lab, roomy)
        before = node_counts(lab, roomy)["hits"]
        assert roomy.run("\nconsole.log(require('late'))", language="node").stdout == f"{text}\n"
        assert node_counts(lab, roomy)["hits"] == before + 1
    roomy.exec(["rm", "-r", "/workspace/node_modules"])
    assert warm_node(lab, roomy, ["node", "-e", "require('late')"]).exit_code == 1


@pytest.mark.parametrize(("options", "says"), [
    ({"env": {"NODE_OPTIONS": "--stack-trace-limit=3"}}, "3 0\n"), ({"env": {"NODE_NO_WARNINGS": "1"}}, "10 0\n"),
    ({"env": {"TZ": "Asia/Tokyo"}}, "10 -540\n"), ({"env": {"LD_PRELOAD": ""}}, "10 0\n"), ({"user": "nobody"}, "10 0\n"),
    ({"env": {"LANG": "de_DE.UTF-8"}}, "10 0\n"),
])  # fmt: skip
def test_what_a_start_looks_at_makes_it_cold(lab: Lab, line: Sandbox, options: dict[str, object], says: str) -> None:
    heat_node(lab, line)
    before = node_counts(lab, line)["hits"]
    code = "console.log(Error.stackTraceLimit, new Date(0).getTimezoneOffset())"
    assert line.exec(["node", "-e", code], **options).stdout == says  # type: ignore[arg-type]
    assert node_counts(lab, line)["hits"] == before


@pytest.fixture(scope="module")
def line(lab: Lab) -> Iterator[Sandbox]:
    with lab.sandbox(runtime="container", **ROOM) as made:
        yield made


@pytest.mark.parametrize(
    "words", [["-p", "1 + 1"], ["--check", "/x.js"], ["-e"], ["-e", "1", "--bad"], ["-"], ["-e", "-1"]]
)
def test_other_ways_to_call_it_are_what_they_always_were(lab: Lab, line: Sandbox, words: list[str]) -> None:
    heat_node(lab, line)
    before = node_counts(lab, line)["hits"]
    told = [line.exec(["node", *words], user=user) for user in (None, "root")]
    assert len({(t.exit_code, t.stdout, t.stderr) for t in told}) == 1
    assert node_counts(lab, line)["hits"] == before


def test_a_terminal_is_a_cold_start(lab: Lab, line: Sandbox) -> None:
    heat_node(lab, line)
    before = node_counts(lab, line)["hits"]
    with line.pty(["node", "-e", "process.exit(process.stdout.isTTY ? 5 : 6)"]) as terminal:
        assert terminal.wait().exit_code == 5
    assert node_counts(lab, line)["hits"] == before


def test_another_node_is_taken_from_then_on(lab: Lab, box: Sandbox) -> None:
    heat_node(lab, box)
    box.files.write("/usr/local/bin/node", "#!/bin/sh\necho another\n")
    box.exec(["chmod", "755", "/usr/local/bin/node"])
    for _ in range(3):  # it never says that it is ready, so it never gets a program
        assert box.run("console.log(1)", language="node").stdout == "another\n"
    box.exec(["rm", "/usr/local/bin/node"])
    assert box.run("console.log(1)", language="node").stdout == "1\n"


def test_one_that_lies_cannot_outlast_a_timeout(lab: Lab, box: Sandbox) -> None:
    box.files.write("/usr/local/bin/node", "#!/bin/sh\nprintf rrrr\nexec sleep 1000\n")
    box.exec(["chmod", "755", "/usr/local/bin/node"])
    box.exec(["node", "-e", "1"], timeout=1)
    until(lambda: node_counts(lab, box)["ready"], "the agent believes that one waits")
    found = box.exec(["node", "-e", "1"], timeout=2)
    assert found.timed_out and found.stdout == "rrr"
    assert box.exec("echo here").stdout == "here\n"


@pytest.mark.parametrize("signal", ["KILL", "STOP"])
def test_killed_or_stopped_from_inside_it_costs_a_head_start(lab: Lab, runtime: str, signal: str) -> None:
    with lab.sandbox(runtime=runtime, **ROOM) as made:
        heat_node(lab, made)
        before = node_counts(lab, made)["hits"]
        made.exec(f"for p in /proc/[0-9]*; do grep -qx node $p/comm && kill -{signal} ${{p#/proc/}}; done; true")
        assert made.run("console.log('still')", language="node").stdout == "still\n"
        assert node_counts(lab, made)["hits"] == before
        assert warm_node(lab, made, ["node", "-e", "console.log('again')"]).stdout == "again\n"


def test_a_timeout_ends_the_whole_tree(lab: Lab, roomy: Sandbox) -> None:
    found = warm_node(lab, roomy, ["node", "-e", TREE], timeout=3)
    assert (found.timed_out, found.stdout) == (True, "up\n")
    until(lambda: not roomy.processes(), "nothing of it is left")


def test_going_away_ends_the_whole_tree(lab: Lab, line: Sandbox) -> None:
    heat_node(lab, line)
    before = node_counts(lab, line)["hits"]
    stream = line.stream(["node", "-e", TREE])
    for item in stream:
        if getattr(item, "data", b""):
            break
    assert node_counts(lab, line)["hits"] == before + 1
    stream.close()  # type: ignore[attr-defined]
    until(lambda: not line.processes(), "nothing of it is left")


def test_many_at_once_all_are_right(lab: Lab, roomy: Sandbox) -> None:
    heat_node(lab, roomy)
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda n: roomy.run(f"console.log({n})", language="node").stdout, range(8)))
    assert found == [f"{n}\n" for n in range(8)]


def test_long_input_much_output_and_long_code(lab: Lab, line: Sandbox) -> None:
    data = "x" * 3_000_000
    found = warm_node(
        lab, line, ["node", "-e", "process.stdin.pipe(process.stdout)"], stdin=data, output_limit=4_000_000
    )
    assert found.stdout == data
    assert line.exec(["node", "-e", "console.log(1)//" + "x" * 90_000]).stdout == "1\n"


def test_a_directory_that_is_gone_is_a_cold_start(lab: Lab, line: Sandbox) -> None:
    heat_node(lab, line)
    found = line.exec(["sh", "-c", "mkdir -p /tmp/gone && cd /tmp/gone && rmdir /tmp/gone && node -e 'console.log(1)'"])
    assert found.stdout == "1\n"


def test_it_is_not_one_of_the_sandboxes_processes(lab: Lab, roomy: Sandbox) -> None:
    heat_node(lab, roomy)
    until(lambda: not roomy.processes(), f"nothing runs: {roomy.processes()}")


@pytest.mark.skipif(not HELD, reason="memory cannot be limited here")
def test_it_is_the_first_to_go_when_memory_runs_out(lab: Lab, box: Sandbox) -> None:
    """No program dies for want of the memory it has: the kernel takes it before any other."""
    heat_node(lab, box)
    scores = "for p in /proc/[0-9]*; do grep -qx node $p/comm && cat $p/oom_score_adj; done; true"
    assert box.exec(scores).stdout == "1000\n"
    code = "console.log(require('fs').readFileSync('/proc/self/oom_score_adj', 'utf8'))"
    assert warm_node(lab, box, ["node", "-e", code]).stdout == box.exec(["node", "-e", code], user="root").stdout
    heat_node(lab, box)
    assert box.exec(["python3", "-c", "x = b'x' * (600 << 20)"], user="root").exit_code != 0
    until(lambda: not node_counts(lab, box)["ready"], "it has gone")
    assert box.run("console.log('after')", language="node").stdout == "after\n"


@pytest.mark.skipif(not HELD, reason="memory cannot be limited here")
def test_it_goes_when_others_need_the_memory(lab: Lab, roomy: Sandbox) -> None:
    heat_node(lab, roomy)
    hold = f"x = b'x' * (330 << 20)\nprint('held', flush=True)\nimport time\ntime.sleep({PATIENCE})"
    stream = roomy.stream(["python3", "-c", hold], user="root")
    for item in stream:
        if getattr(item, "data", b""):
            break
    until(lambda: not node_counts(lab, roomy)["ready"], "it has gone")
    stream.close()  # type: ignore[attr-defined]


@pytest.mark.parametrize("limits", [{"memory_mb": 200, "pids": 256}, {"memory_mb": 512, "pids": 64}])
def test_little_room_keeps_it_out(lab: Lab, limits: dict[str, int]) -> None:
    with lab.sandbox(runtime="container", **limits) as made:
        for _ in range(2):
            assert made.run("console.log(1)", language="node").stdout == "1\n"
        made.exec("sleep 0.5")  # one that was wrongly started would be seen by then, though not always
        found = node_counts(lab, made)
        assert (found["hits"], found["ready"], found["deaths"]) == (0, False, 0)


def test_switched_off_there_is_none() -> None:
    lab = Lab(NO_SPARES + "[warm]\nnode = false\n")
    try:
        with lab.sandbox(runtime="container", **ROOM) as made:
            for _ in range(3):
                assert made.run("console.log(1)", language="node").stdout == "1\n"
            assert node_counts(lab, made) == {"hits": 0, "misses": 0, "ready": False, "deaths": 0}
    finally:
        lab.close()


@pytest.mark.parametrize("early", [False, True])
def test_a_claimed_sandbox_has_one_only_where_that_is_wanted(early: bool) -> None:
    wanted = "[warm]\nnode_pool = true\n" if early else ""
    lab = Lab(f'[sandboxes]\nruntime = "container"\n[pool]\nfloor = 1\nceiling = 1\n{wanted}')
    try:
        lab.cli("daemon", "prewarm")
        until(lambda: json.loads(lab.cli("daemon", "status", "--json").stdout)["pool"]["ready"], "a sandbox waits")
        made = Sandbox.create(home=lab.home, env={"MINE": "yes"})
        if early:
            until(lambda: node_counts(lab, made)["ready"], "a Node waits in it, and nothing has run yet")
        else:
            assert not node_counts(lab, made)["ready"] and not node_counts(lab, made)["misses"]
        assert warm_node(lab, made, ["node", "-e", "console.log(process.env.MINE)"]).stdout == "yes\n"
        assert node_counts(lab, made)["misses"] == (0 if early else 1)
        made.destroy()
    finally:
        lab.close()
