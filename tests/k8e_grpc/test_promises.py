"""What K8E's documents promise about running code, files and the network, through the gRPC door and on each runtime.

The same promises are kept at the other doors by tests/behaviour, tests/cli and tests/network.
"""

import json
import socket
import threading
import time
from contextlib import suppress

import grpc
import pytest
from lab.sandboxes import RUNTIMES

from atoll.client import calls
from atoll.client._sync.driver import Link

from .test_rpcs import code, gone, poll, refusal

WAIT = 90.0


@pytest.fixture(scope="module", params=RUNTIMES)
def runtime(request, gateway) -> str:
    name = str(request.param)
    known = Link(path=str(gateway.home / "daemon.sock")).call(calls.get("/v1/runtimes"))["runtimes"]
    if not next(one for one in known if one["name"] == name)["works"]:
        pytest.skip(f"{name} does not work here")
    return name


@pytest.fixture(scope="module")
def place(local, runtime):
    """A session on each runtime, for tests that leave nothing behind which others would mind."""
    made = local.CreateSession(runtime_class=runtime, memory_mb=512, pids=256).session_id
    assert local.GetSession(session_id=made).runtime_class == runtime
    yield made
    local.DestroySession(session_id=made)


def test_k8e_P01_code_runs_and_all_is_told(local, place) -> None:
    done = local.Exec(
        session_id=place, code="import sys\nprint('hello')\nprint('x', file=sys.stderr)", language="python"
    )
    assert (done.stdout, done.stderr, done.exit_code, done.status) == ("hello\n", "x\n", 0, "completed")
    assert done.session_id == place and place.startswith("sess-") and done.language == "python"


@pytest.mark.parametrize(
    ("language", "one", "many"),
    [
        ("", "echo 1; echo 2", "echo 1\necho 2\n"),
        ("bash", "echo 1; echo 2", "echo 1\necho 2\n"),
        ("python", "print(1); print(2)", "for i in range(2):\n    print(i + 1)\n"),
        ("node", "console.log(1); console.log(2)", "for (const i of [1, 2]) {\n  console.log(i)\n}\n"),
    ],
)
def test_k8e_P02_P04_every_language_on_one_line_or_many(local, place, language, one, many) -> None:
    for text in (one, many):
        done = local.Exec(session_id=place, code=text, language=language, timeout=60)
        assert (done.stdout, done.exit_code) == ("1\n2\n", 0), done.stderr


def test_k8e_P05_the_exit_code_is_the_commands(local, place) -> None:
    for number in (0, 1, 7, 255):
        assert local.Exec(session_id=place, command=f"exit {number}").exit_code == number


def test_k8e_P06_output_is_there_before_the_command_ends(local, place) -> None:
    waits = "echo first; while [ ! -e /workspace/go ]; do sleep 0.05; done; echo second; rm /workspace/go; exit 3"
    stream = local.ExecStream(session_id=place, command=waits, timeout=80)
    seen = ""
    for piece in stream:
        seen += piece.chunk
        if seen == "first\n" and piece.chunk:
            local.WriteFile(session_id=place, path="/workspace/go", content="x")
    assert seen == "first\nsecond\n" and piece.done and piece.exit_code == 3


def test_k8e_P07_D02_a_timeout_ends_the_tree_and_keeps_the_output(local, place) -> None:
    done = local.Exec(session_id=place, command="echo early; (sleep 4567 &) ; sleep 4567", timeout=4)
    assert (done.status, done.exit_code, done.stdout) == ("timed_out", -1, "early\n")
    gone(local, place, "4567")


def test_k8e_P08_P14_files_stay_and_only_newer_ones_are_listed(local, place) -> None:
    local.WriteFile(session_id=place, path="/workspace/dir/a", content="one\n")
    local.WriteFile(session_id=place, path="/workspace/dir/a", content="two\n", mode="a")
    assert local.Exec(session_id=place, command="cat dir/a").stdout == "one\ntwo\n"
    assert local.ReadFile(session_id=place, path="/workspace/dir/a").content == "one\ntwo\n"
    local.Exec(session_id=place, command="touch -d @1000 dir/old")
    listed = {one.path.rpartition("/")[2] for one in local.ListFiles(session_id=place).files}
    newer = {one.path.rpartition("/")[2] for one in local.ListFiles(session_id=place, since=2000).files}
    assert {"a", "old"} <= listed and "a" in newer and "old" not in newer
    local.Exec(session_id=place, command="rm -r dir")


def test_k8e_P13_D12_D16_a_workspace_is_fresh_and_ends_with_its_session(local, runtime) -> None:
    first = local.CreateSession(runtime_class=runtime, memory_mb=256).session_id
    assert not local.ListFiles(session_id=first).files
    local.Exec(session_id=first, command="echo mine > /workspace/x; echo mine > /tmp/x; echo mine > /dev/shm/x")
    local.Exec(session_id=first, command="sleep 4321", background=True)
    local.DestroySession(session_id=first)
    assert code(local.Exec, session_id=first, command="true") == "NOT_FOUND"
    second = local.CreateSession(runtime_class=runtime, memory_mb=256).session_id
    try:
        assert local.Exec(session_id=second, command="ls -A /workspace /dev/shm; ls /tmp/x").stdout.count("x") == 0
        assert (
            "4321"
            not in local.Exec(session_id=second, command="cat /proc/[0-9]*/cmdline 2>/dev/null | tr '\\0' ' '").stdout
        )
    finally:
        local.DestroySession(session_id=second)


def test_k8e_P17_five_names_by_default(local, place) -> None:
    names = list(local.GetSession(session_id=place).allowed_hosts)
    assert len(names) == 5 and {"github.com", "raw.githubusercontent.com"} <= set(names)


CONNECT = """
import socket, sys
for target in [("192.0.2.7", 443), ("example.com", 443), ("169.254.169.254", 80)]:
    try:
        socket.create_connection(target, 5)
        print("reached", target)
    except OSError:
        pass
"""


def test_k8e_P19_D21_nothing_is_reached_and_root_inside_cannot_change_that(local, place) -> None:
    """Deny by default, also after the sandbox's root has done what root does to a firewall; and it is not the host's root."""
    undo = "nft flush ruleset; iptables -F; ip route add default dev lo; ip addr add 192.0.2.7/24 dev eth0; true"
    assert local.Exec(session_id=place, code=CONNECT, language="python", timeout=60).stdout == ""
    local.Exec(session_id=place, command=undo, timeout=60)
    assert local.Exec(session_id=place, code=CONNECT, language="python", timeout=60).stdout == ""
    inside = local.Exec(
        session_id=place, command="id -u; grep CapEff /proc/self/status; ls -d /var/run/secrets 2>&1"
    ).stdout
    assert inside.startswith("0\n") and "No such file" in inside
    policy = json.loads(local.GetSession(session_id=place).policy_json)
    assert policy, "what holds for a session can be read"


def test_k8e_D20_no_free_moment_from_create_to_the_last_process(local, runtime) -> None:
    """A program that tries to get out from its first moment to its last never does: the host hears nothing."""
    with socket.create_server(("0.0.0.0", 0)) as heard:
        heard.settimeout(0.2)
        address = "127.0.0.1"
        with (
            socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe,
            suppress(OSError),
        ):  # a machine without a way out
            probe.connect(("192.0.2.1", 9))
            address = probe.getsockname()[0]
        port = heard.getsockname()[1]
        hammer = (
            f"import socket\nwhile True:\n  for a in ({address!r}, '127.0.0.1'):\n    try:\n"
            f"      s = socket.create_connection((a, {port}), 1); s.send(b'out'); s.close()\n    except OSError:\n      pass\n"
        )
        made = local.CreateSession(runtime_class=runtime, memory_mb=256).session_id
        run = local.Exec(session_id=made, argv=["python3", "-c", hammer], background=True).run_id
        local.UpdateAllowedHosts(session_id=made, hosts=["a.example"])
        local.UpdateAllowedHosts(session_id=made)
        assert local.Exec(session_id=made, command="sleep 0.5").exit_code == 0
        assert local.PollRun(run_id=run).status == "running"
        local.DestroySession(session_id=made)
        with pytest.raises(TimeoutError):
            heard.accept()


@pytest.mark.parametrize("name", ["kata", "firecracker"])
def test_k8e_P28_a_runtime_whose_needs_are_missing_is_a_clear_error(local, name) -> None:
    error = refusal(local.CreateSession, runtime_class=name)
    assert error.code() in (grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.UNIMPLEMENTED)
    assert name in error.details()


def test_k8e_P31_a_call_costs_milliseconds(local, place, runtime) -> None:
    """1 to 5 ms is what bench/ measures; here ten times that, for the best of many on a busy machine. An emulated kernel
    takes tens of milliseconds to start a program."""
    bound = 0.05 if runtime == "container" else 1.0
    best = WAIT
    until = time.monotonic() + WAIT
    while best > bound:
        assert time.monotonic() < until, f"the best call took {best * 1000:.1f} ms"
        started = time.monotonic()
        assert local.Exec(session_id=place, argv=["/bin/true"]).exit_code == 0
        best = min(best, time.monotonic() - started)


def test_k8e_D04_a_flood_on_both_streams_never_deadlocks(local, place) -> None:
    flood = "import sys\nfor i in range(40):\n  sys.stdout.write('o' * 50000)\n  sys.stderr.write('e' * 50000)\n"
    sizes = {"stdout": 0, "stderr": 0}
    for piece in local.ExecStream(session_id=place, argv=["python3", "-c", flood], timeout=80):
        if piece.data:
            sizes[piece.stream] += len(piece.data)
    assert sizes == {"stdout": 2_000_000, "stderr": 2_000_000}
    done = local.Exec(session_id=place, argv=["python3", "-c", flood], timeout=80)
    assert done.exit_code == 0 and done.truncated and len(done.stdout) == len(done.stderr) == 1 << 20


def test_k8e_D06_long_commands_run(local, place) -> None:
    text = "x" * 100_000
    assert local.Exec(session_id=place, command=f"printf %s {text} | wc -c").stdout.strip() == "100000"


def test_k8e_D07_file_errors_are_typed_and_the_session_lives(local, place) -> None:
    assert code(local.ReadFile, session_id=place, path="/workspace/none") == "NOT_FOUND"
    assert code(local.WriteFile, session_id=place, path="/proc/none/x", content="x") != "INTERNAL"
    assert code(local.ReadFile, session_id=place, path="/workspace") in ("INVALID_ARGUMENT", "FAILED_PRECONDITION")
    odd = "/workspace/a b'c\"d$(e)\n\u202e"
    local.WriteFile(session_id=place, path=odd, content="odd")
    assert local.ReadFile(session_id=place, path=odd).content == "odd"
    local.Exec(session_id=place, command="rm -f /workspace/a*")


def test_k8e_D08_processes_are_listed_under_load(local, place) -> None:
    run = local.Exec(session_id=place, command="for i in 1 2 3 4 5 6 7 8; do sleep 9876 & done; wait", background=True)
    until = time.monotonic() + WAIT
    while True:
        seen = [one for one in local.GetProcesses(session_id=place).processes if "9876" in one.cmdline]
        if len([one for one in seen if one.comm == "sleep"]) == 8:
            break
        assert time.monotonic() < until, seen
        time.sleep(0.05)
    assert all(one.pid > 1 and len(one.state) == 1 for one in seen)
    local.Exec(session_id=place, command="pkill -9 -f 9876; true")
    poll(local, run.run_id)


def test_k8e_D09_blank_lines_and_separate_streams(local, place) -> None:
    pieces = list(local.ExecStream(session_id=place, command="printf 'a\\n\\n\\nb\\n'; printf '\\n\\nc' >&2"))
    text = {name: "".join(one.chunk for one in pieces if one.stream == name) for name in ("stdout", "stderr")}
    assert text == {"stdout": "a\n\n\nb\n", "stderr": "\n\nc"}


def test_k8e_D10_a_child_that_holds_stdout_does_not_delay(local, place) -> None:
    done = local.Exec(session_id=place, command="(sleep 5432 &); echo done", timeout=60)
    assert (done.status, done.stdout) == ("completed", "done\n")
    local.Exec(session_id=place, command="pkill -9 -f 5432; true")


def test_k8e_D11_the_environment_is_set(local, place) -> None:
    shown = local.Exec(
        session_id=place, command="echo $HOME; echo $LANG; echo $TERM; echo $PATH; pwd"
    ).stdout.splitlines()
    assert len(shown) == 5 and all(shown) and "/usr/bin" in shown[3] and shown[4] == "/workspace"
    terminal = local.CreateTerminal(session_id=place, argv=["echo", "found"]).terminal_id
    assert b"found" in b"".join(frame.data for frame in local.TerminalStream(terminal_id=terminal))


def test_k8e_D14_transcript_and_events_hold_what_happened(local, place) -> None:
    local.Exec(session_id=place, command="echo for-the-record")
    until, offset = time.monotonic() + WAIT, 0
    while "for-the-record" not in (window := local.GetTranscript(session_id=place, offset=offset)).output:
        assert time.monotonic() < until
        offset = window.next_offset
    kinds = {json.loads(event)["ev"] for event in local.GetEvents(session_id=place).events}
    assert {"created", "exec_end"} <= kinds


def test_k8e_D26_special_characters_arrive(local, place) -> None:
    text = "$HOME `id` \"quoted\" 'single' \\n \\\\ $(id) !x %s {a,b} ~ *"
    assert local.Exec(session_id=place, code=f"print({text!r})", language="python").stdout == text + "\n"
    assert local.Exec(session_id=place, argv=["printf", "%s", text]).stdout == text


def test_k8e_D27_parallel_runs_do_not_mix(local, place) -> None:
    answers: dict[int, str] = {}

    def run(number: int) -> None:
        program = f"import time\nfor i in range(5):\n    print({number})\n    time.sleep(0.01)\n"
        answers[number] = local.Exec(session_id=place, code=program, language="python", timeout=80).stdout

    threads = [threading.Thread(target=run, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT)
    assert answers == {number: f"{number}\n" * 5 for number in range(8)}
