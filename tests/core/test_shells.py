"""Shell sessions on real sandboxes: state is kept, every command has its own end, and a session survives what it runs."""

import base64
import json
import os
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from lab.daemon import Box, DaemonProcess, Failed, until


class Shell:
    """A session through REST."""

    def __init__(self, box: Box, language: str = "bash", **fields: Any) -> None:
        self.box, self.daemon = box, box.daemon
        self.id = self.daemon.post(f"{box.path}/shells", {"language": language, **fields})["shell_id"]
        self.path = f"{box.path}/shells/{self.id}"

    def run(self, command: str, **fields: Any) -> dict[str, Any]:
        result: dict[str, Any] = self.daemon.post(f"{self.path}/run", {"command": command, **fields})
        return result

    def said(self, command: str, **fields: Any) -> tuple[str, str, int]:
        result = self.run(command, **fields)
        return result["stdout"], result["stderr"], result["exit_code"]

    def states(self) -> list[str]:
        shells = self.daemon.get(f"{self.box.path}/shells")["shells"]
        return [shell["state"] for shell in shells if shell["shell_id"] == self.id]

    def close(self) -> None:
        self.daemon.delete(self.path)


RUNTIMES = os.environ.get("ATOLL_TEST_RUNTIMES", "container,gvisor").split(",")


@pytest.fixture(scope="module", params=RUNTIMES)
def box(request: pytest.FixtureRequest, daemon: DaemonProcess) -> Iterator[Box]:
    """A sandbox of each runtime of this machine."""
    status = {found["name"]: found for found in daemon.get("/v1/runtimes")["runtimes"]}
    if not status.get(request.param, {}).get("works"):
        pytest.skip(f"{request.param} does not work here")
    made = daemon.create(runtime=request.param)
    yield made
    made.destroy()


@pytest.fixture
def shell(box: Box) -> Iterator[Shell]:
    opened = Shell(box)
    yield opened
    opened.close()


def test_everyday_30_directory_environment_functions_and_last_code_are_kept(shell: Shell) -> None:
    assert shell.said("cd /tmp && export A=1; f() { echo f $A; }; echo out; echo err >&2") == ("out\n", "err\n", 0)
    assert shell.said("pwd; f; env | grep ^A=; (exit 7)") == ("/tmp\nf 1\nA=1\n", "", 7)
    assert shell.said("echo $?") == ("7\n", "", 0)


def test_syntax_errors_heredocs_and_unset_names_leave_the_session(shell: Shell) -> None:
    out, err, code = shell.said("if ; then")
    assert (out, code) == ("", 2) and "syntax error" in err
    assert shell.said("cat <<'X'\na $b\nX") == ("a $b\n", "", 0)
    assert shell.said("set -u; echo $no_such_name; echo not reached")[::2] == ("", 1)
    assert shell.said("set +u; echo on") == ("on\n", "", 0)


def test_stdin_is_empty_or_what_was_given(shell: Shell) -> None:
    assert shell.said("cat; echo end") == ("end\n", "", 0)
    assert shell.said("read x; echo got $x", stdin="one\ntwo\n") == ("got one\n", "", 0)
    assert shell.said("cat", stdin="whole") == ("whole", "", 0)


def test_much_output_and_bytes(shell: Shell) -> None:
    result = shell.run("head -c 1000000 /dev/zero | tr '\\0' x; echo e >&2")
    assert (result["stdout_bytes"], len(result["stdout"]), result["stderr"]) == (1_000_000, 1_000_000, "e\n")
    assert base64.b64decode(shell.run(r"printf 'a\xff\x00b'")["stdout_b64"]) == b"a\xff\x00b"


def test_output_cannot_be_taken_for_the_end(shell: Shell) -> None:
    assert shell.said("echo end 0; echo ready 1; echo end 0 >&2; false") == ("end 0\nready 1\n", "end 0\n", 1)
    assert shell.said("exec >/tmp/taken; echo hidden")[0] == ""
    assert shell.said("cat /tmp/taken") == ("hidden\n", "", 0)


def test_a_background_job_does_not_hold_the_command(shell: Shell) -> None:
    result = shell.run("sleep 4545 & echo started")
    assert (result["stdout"], result["exit_code"], result["timed_out"]) == ("started\n", 0, False)
    assert shell.said("kill %1; wait %1; echo $?")[0] == "143\n"


@pytest.mark.parametrize(("command", "code"), [("exit 3", 3), ("set -e; false; echo no", 1), ("kill -9 $$", 137)])
def test_what_ends_the_session_is_told(box: Box, command: str, code: int) -> None:
    shell = Shell(box)
    result = shell.run(f"echo last; {command}")
    assert (result["stdout"], result["exit_code"], result["shell_ended"]) == ("last\n", code, True)
    with pytest.raises(Failed) as caught:
        shell.run("echo more")
    assert caught.value.code == "not_found" and caught.value.error["details"]["exit_code"] == code
    until(lambda: shell.id not in box.exec("ls -a /tmp")["stdout"], "its directory is removed")


@pytest.mark.parametrize("command", ["sleep 4646", "while :; do :; done", "trap '' INT; sleep 4646"])
def test_a_timeout_leaves_the_session(shell: Shell, command: str) -> None:
    shell.run("kept=1; sleep 4747 & left=$!")
    result = shell.run(f"echo begun; {command}", timeout_ms=2000)
    assert (result["status"], result["stdout"], result["timed_out"]) == ("timed_out", "begun\n", True)
    if result["shell_ended"]:
        assert shell.states() == []
        pytest.fail("the session was lost")
    assert shell.said("echo $kept; kill -0 $left && echo left") == ("1\nleft\n", "", 0)
    assert "4646" not in shell.box.exec("cat /proc/[0-9]*/cmdline | tr '\\0' ' '")["stdout"].replace("tr", "")


@pytest.mark.parametrize("command", ["sleep 4848", "while :; do :; done", "while :; do sleep 4848; done"])
def test_an_interrupt_reaches_the_command_and_not_the_session(shell: Shell, command: str) -> None:
    answers: list[dict[str, Any]] = []
    thread = threading.Thread(target=lambda: answers.append(shell.run(f"a=5; echo begun; {command}", timeout_ms=0)))
    thread.start()
    until(lambda: shell.states() == ["running"], "it runs")
    until(lambda: "begun" in _output(shell), "it has begun")
    with pytest.raises(Failed) as caught:
        shell.run("echo second")
    assert caught.value.code == "failed_precondition"
    shell.daemon.post(f"{shell.path}/interrupt")
    thread.join()
    assert (answers[0]["stdout"], answers[0]["exit_code"], answers[0]["shell_ended"]) == ("begun\n", 130, False)
    assert shell.said("echo $a") == ("5\n", "", 0)


def _output(shell: Shell) -> str:
    shells = shell.daemon.get(f"{shell.box.path}/shells")["shells"]
    running = next((s["command_id"] for s in shells if s["shell_id"] == shell.id), None)
    return str(shell.box.command(running)["stdout"]) if running else ""


def test_a_command_is_read_again_after_its_caller_left(shell: Shell) -> None:
    command = {"command": "echo one; read line < /tmp/go; echo two", "id": "rejoined", "timeout_ms": 0}
    shell.run("mkfifo /tmp/go")
    frames = shell.daemon.stream(f"{shell.path}/run", command)
    assert next(frames)[0] == 3 and next(frames) == (1, b"one\n")
    frames.close()  # type: ignore[attr-defined]  # the connection is gone
    shell.box.exec("echo > /tmp/go")
    again = list(shell.daemon.stream(f"{shell.box.path}/commands/rejoined/stream?stdout=4"))
    assert (1, b"two\n") in again and json.loads(again[-1][1])["exit_code"] == 0
    assert shell.run(**command)["stdout"] == "one\ntwo\n"  # the same request again is the same command
    assert shell.said("echo alive")[0] == "alive\n"


def test_a_session_outlives_the_daemon(own_daemon: DaemonProcess) -> None:
    shell = Shell(own_daemon.create())
    shell.run("cd /tmp; x=3")
    own_daemon.kill()
    own_daemon.start()
    assert shell.said("pwd; echo $x") == ("/tmp\n3\n", "", 0)


def test_python_keeps_names_and_tells_tracebacks(box: Box) -> None:
    shell = Shell(box, "python")
    assert shell.said("import os\nx = 20\nprint('hi')") == ("hi\n", "", 0)
    assert shell.said("x + 1") == ("21\n", "", 0)
    out, err, code = shell.said("def f():\n    return 1 / 0\nf()")
    assert (out, code) == ("", 1) and "ZeroDivisionError" in err and "return 1 / 0" in err and "<string>" not in err
    assert "SyntaxError" in shell.said("def")[1]
    assert shell.said("import sys; sys.stdin.read()", stdin="in") == ("'in'\n", "", 0)
    assert shell.said("os.system('echo child; exit 3') >> 8") == ("child\n3\n", "", 0)
    result = shell.run("while True: pass", timeout_ms=1500)
    assert result["timed_out"] and not result["shell_ended"] and "KeyboardInterrupt" not in result["stdout"]
    assert shell.said("x") == ("20\n", "", 0)
    ended = shell.run("raise SystemExit(4)")
    assert (ended["exit_code"], ended["shell_ended"]) == (4, True)


def test_node_keeps_names_and_tells_errors(box: Box) -> None:
    if box.exec("command -v node")["exit_code"]:
        pytest.skip("no node on this machine")
    shell = Shell(box, "node")
    assert shell.said("var x = 20; console.log('hi'); console.error('err')") == ("hi\n", "err\n", 0)
    assert shell.said("x + 1") == ("21\n", "", 0)
    out, err, code = shell.said("null.f()")
    assert (out, code) == ("", 1) and "TypeError" in err
    assert shell.said("await new Promise(r => setTimeout(r, 10)); console.log('later')") == ("later\n", "", 0)
    child = "require('child_process').spawnSync('echo', ['child'], {stdio: 'inherit'}).status"
    assert shell.said(child) == ("child\n0\n", "", 0)
    result = shell.run("while (true) {}", timeout_ms=1500)
    assert result["timed_out"] and not result["shell_ended"]
    assert shell.said("x") == ("20\n", "", 0)
    ended = shell.run("process.exit(4)")
    assert (ended["exit_code"], ended["shell_ended"]) == (4, True)


def test_wrong_requests_and_users(box: Box) -> None:
    with pytest.raises(Failed) as caught:
        Shell(box, "cobol")
    assert caught.value.code == "invalid_argument"
    with pytest.raises(Failed) as caught:
        box.daemon.post(f"{box.path}/shells/nope/run", {"command": "true"})
    assert caught.value.code == "not_found"
    with pytest.raises(Failed) as caught:
        Shell(box, user="no-such-user", cwd="/")
    assert caught.value.code == "user_not_found"
    shell = Shell(box, user="root", cwd="/tmp", env={"B": "b c"})
    assert shell.said('pwd; echo "$B"') == ("/tmp\nb c\n", "", 0)
    shell.close()
    assert shell.states() == []
    shell.close()


@pytest.mark.parametrize("language", ["bash", "python", "node"])
def test_everyday_30_sessions_of_another_user(box: Box, language: str) -> None:
    """All that root's have: streams, stdin, timeouts, interrupts; with that user's rights and nothing left behind."""
    if language == "node" and box.exec("command -v node")["exit_code"]:
        pytest.skip("no node on this machine")
    shell = Shell(box, language, user="nobody", cwd="/")
    if language == "bash":
        assert shell.said("cd /tmp; x=1; id -u; echo e >&2; cat", stdin="in") == ("65534\nin", "e\n", 0)
        assert shell.said("pwd; echo $x >/dev/stdout; cat /root/x 2>/dev/null") == ("/tmp\n1\n", "", 1)
        endless = "trap '' INT; sleep 4949"
    elif language == "python":
        assert shell.said("import os, sys; x = 1; sys.stderr.write('e'); os.getuid()") == ("65534\n", "e", 0)
        assert shell.said("x") == ("1\n", "", 0)
        endless = "while True: pass"
    else:
        assert shell.said("var x = process.getuid(); console.error('e')") == ("", "e\n", 0)
        assert shell.said("x") == ("65534\n", "", 0)
        endless = "while (true) {}"
    result = shell.run(endless, timeout_ms=1500)
    assert result["timed_out"] and not result["shell_ended"]
    assert shell.said("echo on" if language == "bash" else "1")[2] == 0
    shell.close()
    assert "4949" not in box.exec("cat /proc/[0-9]*/cmdline | tr '\\0' ' '")["stdout"].replace("tr", "")
    until(lambda: shell.id not in box.exec("ls -a /tmp")["stdout"], "its directory is removed")


def test_everyday_30_one_user_does_not_reach_the_session_of_another(box: Box) -> None:
    shell = Shell(box, user="nobody", cwd="/")
    shell.run("secret=1")
    pid = shell.said("echo $$")[0].strip()
    own = f"/tmp/.atoll-shell-{shell.id}"
    for attempt in (f"ls {own}", f"echo x > {own}/orders", f"echo x > /proc/{pid}/fd/1", f"kill {pid}",
                    f"timeout 5 head -c 1 /proc/{pid}/fd/1", f"timeout 5 head -c 1 /proc/{pid}/fd/0"):  # fmt: skip
        tried = box.exec(attempt, user="1")
        said = tried["stderr"].lower()
        assert (tried["stdout"], tried["exit_code"]) != ("", 0), attempt
        assert "denied" in said or "not permitted" in said, (attempt, tried)
    assert shell.said("echo $secret") == ("1\n", "", 0)
    shell.close()


def test_everyday_30_a_sandbox_has_so_many_terminals(box: Box) -> None:
    """The next one is refused with words, and one that has ended makes room."""
    asked = {"argv": ["sleep", "5151"], "pty": {"rows": 24, "cols": 80}, "background": True}
    opened = []
    with pytest.raises(Failed) as caught:
        for _ in range(40):
            opened.append(box.daemon.post(f"{box.path}/exec", asked)["command_id"])
    assert len(opened) == 32 and caught.value.code == "exhausted"
    box.daemon.post(f"{box.path}/commands/{opened[0]}/kill")
    opened.append(box.daemon.post(f"{box.path}/exec", asked)["command_id"])
    for command in opened[1:]:
        box.daemon.post(f"{box.path}/commands/{command}/kill")
