"""When a warm interpreter serves, when it must not, and that nothing a program does to it costs more than a head start."""

import json
from concurrent.futures import ThreadPoolExecutor

import pytest
from lab.sandboxes import NO_SPARES, Lab, until
from lab.warmth import counts, heat, warm

from atoll import AtollError, Sandbox


def test_run_is_served_warm(lab: Lab, anywhere: Sandbox) -> None:
    heat(lab, anywhere)
    before = counts(lab, anywhere)["hits"]
    assert anywhere.run("print(6 * 7)").stdout == "42\n"
    heat(lab, anywhere)
    assert anywhere.run("import sys\nprint(__file__[:14], sys.path[1])").stdout == "/tmp/_k8e_run_ /workspace\n"
    assert counts(lab, anywhere)["hits"] == before + 2


@pytest.mark.parametrize("options", [
    {"env": {"PYTHONHASHSEED": "1"}}, {"env": {"LC_ALL": "C"}}, {"env": {"LD_PRELOAD": ""}}, {"env": {"TZ": "Asia/Tokyo"}},
    {"env": {"HOME": "/tmp"}}, {"user": "nobody"},
])  # fmt: skip
def test_what_a_start_looks_at_makes_it_cold(lab: Lab, sandbox: Sandbox, options: dict[str, object]) -> None:
    heat(lab, sandbox)
    before = counts(lab, sandbox)["hits"]
    code = (
        "import os, sys, time; print(sys.flags.hash_randomization, time.tzname, os.getuid(), os.path.expanduser('~'))"
    )
    assert sandbox.exec(["python3", "-c", code], **options).exit_code == 0  # type: ignore[arg-type]
    assert counts(lab, sandbox)["hits"] == before


@pytest.mark.parametrize("words", [["-m", "this"], ["-E", "-c", "1"], ["--version"], ["-"], ["-c"], ["/nowhere.py"]])
def test_other_ways_to_call_it_are_what_they_always_were(sandbox: Sandbox, words: list[str]) -> None:
    told = [sandbox.exec(["python3", *words], user=user) for user in (None, "root")]
    assert [(t.exit_code, t.stdout, t.stderr) for t in told[:1]] == [
        (t.exit_code, t.stdout, t.stderr) for t in told[1:]
    ]


def test_packages_and_path_files_that_came_later_are_seen(lab: Lab, anywhere: Sandbox) -> None:
    place = anywhere.run("import site; print(site.getsitepackages()[0])").stdout.strip()
    heat(lab, anywhere)
    anywhere.files.write(f"{place}/came_later.py", "here = 'installed'\n")
    assert warm(lab, anywhere, ["python3", "-c", "import came_later; print(came_later.here)"]).stdout == "installed\n"
    anywhere.files.write(f"{place}/came_later.pth", "/srv/extra\n")
    anywhere.files.mkdir("/srv/extra")
    for _ in range(2):
        assert anywhere.run("import sys; print('/srv/extra' in sys.path)").stdout == "True\n"
    assert "True" in warm(lab, anywhere, ["python3", "-c", "import sys; print('/srv/extra' in sys.path)"]).stdout
    anywhere.exec(["rm", "-rf", f"{place}/came_later.pth", f"{place}/came_later.py", "/srv/extra"])
    assert anywhere.run("import sys; print('/srv/extra' in sys.path)").stdout == "False\n"


def test_modules_beside_the_working_directory(lab: Lab, anywhere: Sandbox) -> None:
    """Also those that a start itself would import: what is found there first wins, as in a fresh interpreter."""
    anywhere.files.write("/workspace/beside.py", "print('beside')\n")
    heat(lab, anywhere)
    assert anywhere.run("import beside").stdout == "beside\n"
    assert anywhere.run("import sys\nimport beside").stdout == "beside\n"
    anywhere.files.write("/workspace/sitecustomize.py", "print('customized')\n")
    assert anywhere.run("import sys\nprint('then')").stdout == "customized\nthen\n"
    anywhere.exec(["rm", "/workspace/sitecustomize.py", "/workspace/beside.py"])
    assert anywhere.run("import sys\nprint('then')").stdout == "then\n"


def test_killed_from_inside_it_costs_a_head_start(lab: Lab, runtime: str) -> None:
    with lab.sandbox(runtime=runtime) as box:
        heat(lab, box)
        box.exec("kill -9 -1")
        assert box.run("print('still')").stdout == "still\n"
        until(lambda: counts(lab, box)["ready"], "it comes back")
        assert warm(lab, box, ["python3", "-c", "print('again')"]).stdout == "again\n"
        for _ in range(8):  # whoever insists gets what he wants, and cold starts from then on
            box.exec(
                "pkill -9 -x python3 || for p in /proc/[0-9]*; do grep -q python3 $p/comm && kill -9 ${p#/proc/}; done"
            )
            assert box.run("print('yes')").stdout == "yes\n"


def test_a_full_process_table(lab: Lab, sandbox: Sandbox) -> None:
    with lab.sandbox(runtime="container", pids=64) as box:
        heat(lab, box)
        bomb = box.exec(":(){ :|:& };:; sleep 0.2", timeout=5)
        assert bomb.status in ("completed", "timed_out")
        until(lambda: box.exec("kill -9 -1; true").status, "it can be cleaned up")
        until(lambda: _says(box, "print('after')") == "after\n", "runs work again")


def _says(box: Sandbox, code: str) -> str:
    try:
        return str(box.run(code).stdout)
    except AtollError:
        return ""


TREE = """
import os, sys, time
for _ in range(2):
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            time.sleep(1000)
        os._exit(0)
print("up", flush=True)
time.sleep(1000)
"""


def test_a_timeout_ends_the_whole_tree(lab: Lab, sandbox: Sandbox) -> None:
    result = warm(lab, sandbox, ["python3", "-c", TREE], timeout=2)
    assert (result.timed_out, result.stdout) == (True, "up\n")
    until(lambda: not [p for p in sandbox.processes() if "python" in str(p.cmdline)], "nothing of it is left")


def test_going_away_ends_the_whole_tree(lab: Lab, sandbox: Sandbox) -> None:
    heat(lab, sandbox)
    before = counts(lab, sandbox)["hits"]
    stream = sandbox.stream(["python3", "-c", TREE])
    for item in stream:
        if getattr(item, "data", b""):
            break
    assert counts(lab, sandbox)["hits"] == before + 1
    stream.close()  # type: ignore[attr-defined]
    until(lambda: not [p for p in sandbox.processes() if "python" in str(p.cmdline)], "nothing of it is left")


def test_many_at_once_all_are_right(lab: Lab, anywhere: Sandbox) -> None:
    heat(lab, anywhere)
    before = counts(lab, anywhere)
    with ThreadPoolExecutor(10) as pool:
        found = list(pool.map(lambda n: anywhere.run(f"print({n})").stdout, range(20)))
    assert found == [f"{n}\n" for n in range(20)]
    after = counts(lab, anywhere)
    assert after["hits"] + after["misses"] >= before["hits"] + before["misses"] + 20 and after["hits"] > before["hits"]


def test_the_agents_own_processes_are_not_the_sandboxes(lab: Lab, anywhere: Sandbox) -> None:
    heat(lab, anywhere)
    until(lambda: not anywhere.processes(), f"nothing runs: {anywhere.processes()}")


def test_switched_off_there_is_none() -> None:
    lab = Lab(NO_SPARES + "[warm]\npython = false\n")
    try:
        with lab.sandbox(runtime="container") as box:
            for _ in range(3):
                assert box.run("print(1)").stdout == "1\n"
            none = {"hits": 0, "misses": 0, "ready": False, "deaths": 0}
            found = counts(lab, box)
            assert (found.pop("node"), found) == (none, none)
    finally:
        lab.close()


def test_little_room_keeps_it_out(lab: Lab) -> None:
    with lab.sandbox(runtime="container", memory_mb=64) as box:
        box.run("print(1)")
        box.run("print(1)")
        assert counts(lab, box)["hits"] == 0 and not counts(lab, box)["ready"]


def test_a_claimed_sandbox_has_it_before_its_first_run() -> None:
    lab = Lab(
        '[sandboxes]\nruntime = "container"\n[pool]\nfloor = 1\nceiling = 1\n[warm]\npreload = ["json", "absent_module"]\n'
    )
    try:
        lab.cli("daemon", "prewarm")
        until(lambda: json.loads(lab.cli("daemon", "status", "--json").stdout)["pool"]["ready"], "a sandbox waits")
        box = Sandbox.create(home=lab.home, env={"MINE": "yes"})
        until(lambda: counts(lab, box)["ready"], "an interpreter waits in it, and nothing has run yet")
        code = "import sys; print('json' in sys.modules, __import__('os').environ['MINE'])"
        assert warm(lab, box, ["python3", "-c", code]).stdout == "True yes\n"
        box.destroy()
    finally:
        lab.close()


def test_output_that_nobody_reads_and_long_input(lab: Lab, sandbox: Sandbox) -> None:
    data = "x" * 3_000_000
    code = "import sys; d = sys.stdin.read(); sys.stdout.write(d); sys.stderr.write(d[:9])"
    result = warm(lab, sandbox, ["python3", "-c", code], stdin=data, output_limit=4_000_000)
    assert (result.stdout, result.stderr) == (data, "x" * 9)


def test_code_too_long_for_a_message(sandbox: Sandbox) -> None:
    assert sandbox.exec(["python3", "-c", "print(1)#" + "x" * 90_000]).stdout == "1\n"
