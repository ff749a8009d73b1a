"""Terminals and jobs: signals reach the foreground, a stopped job ends nothing, a terminal can be closed while it is read."""

import asyncio
import os
import signal
import threading
import time

import pytest
from lab.sandboxes import PATIENCE, Lab, until

from atoll import AsyncSandbox, ExecResult, Pty, Sandbox, errors

CATCHES = "trap 'echo caught %(name)s; exit 3' %(name)s; echo re''ady; while :; do sleep 0.05; done"


def read_until(terminal: Pty, text: bytes) -> bytes:
    seen = b""
    for piece in terminal:
        seen += piece
        if text in seen:
            return seen
    raise AssertionError(f"the terminal ended: {seen!r}")


@pytest.mark.parametrize("name", ["INT", "QUIT", "TERM"])
def test_everyday_19_signal_to_the_foreground_reaches_the_only_group(anywhere: Sandbox, name: str) -> None:
    """A program alone on its terminal gets the signal, by key or not."""
    with anywhere.pty(["sh", "-c", CATCHES % {"name": name}]) as terminal:
        read_until(terminal, b"ready")
        terminal.signal(getattr(signal, f"SIG{name}"))
        assert b"caught " + name.encode() in read_until(terminal, b"caught")
        assert terminal.wait().exit_code == 3


def test_everyday_19_signal_to_the_foreground_reaches_a_job_of_an_interactive_shell(anywhere: Sandbox) -> None:
    """The foreground is the shell's job, not the shell, which ignores SIGINT and lives on."""
    with anywhere.pty(["bash", "--norc", "-i"]) as terminal:
        terminal.write('sh -c "' + CATCHES % {"name": "INT"} + '"\n')
        read_until(terminal, b"ready")
        anywhere.command(terminal.id).signal(signal.SIGINT, group="foreground")
        read_until(terminal, b"caught INT")
        terminal.write("echo al''ive\n")
        read_until(terminal, b"alive")


def test_everyday_19_signal_to_an_unknown_foreground_is_refused_and_not_lost(anywhere: Sandbox) -> None:
    """Either the job gets a signal that no key sends, or the caller is told that it cannot."""
    with anywhere.pty(["bash", "--norc", "-i"]) as terminal:
        terminal.write('sh -c "' + CATCHES % {"name": "USR1"} + '"\n')
        read_until(terminal, b"ready")
        try:
            terminal.signal(signal.SIGUSR1)
        except errors.AtollError as refused:
            assert refused.code == "unsupported" and "foreground" in str(refused)
        else:
            read_until(terminal, b"caught USR1")


def test_everyday_19_a_job_that_is_stopped_does_not_end_the_command(anywhere: Sandbox) -> None:
    line = "sleep 30 & kill -STOP $!; sleep 0.3; echo ok; kill -KILL $!"
    result = anywhere.exec(line)
    assert (result.exit_code, result.stdout) == (0, "ok\n")
    code = (
        "import subprocess, signal\n"
        "job = subprocess.Popen(['sleep', '30'])\n"
        "job.send_signal(signal.SIGSTOP)\n"
        "subprocess.run(['sleep', '0.3'])\n"
        "print('ok', flush=True)\n"
        "job.kill()\n"
    )
    for _ in range(3):  # a warm interpreter too
        ran = anywhere.run(code)
        assert (ran.exit_code, ran.stdout) == (0, "ok\n")


def test_everyday_19_signals_to_a_session_spare_what_watches_it(anywhere: Sandbox) -> None:
    """`group="session"` reaches the command and its children, and the exit is still told."""
    command = anywhere.start("sleep 617 & sleep 617; wait")
    until(lambda: sum("sleep 617" in " ".join(p.cmdline) for p in anywhere.processes()) >= 2, "both sleep")
    command.signal(signal.SIGTERM, group="session")
    assert command.wait().exit_code == 143
    until(lambda: not [p for p in anywhere.processes() if "617" in " ".join(p.cmdline)], "all have ended")


def test_everyday_20_close_of_a_terminal_that_is_being_read(anywhere: Sandbox) -> None:
    """Another thread reads: its loop ends, and the command is killed."""
    terminal = anywhere.pty("echo ready; sleep 618")
    ended: list[object] = []
    ready = threading.Event()

    def read() -> None:
        try:
            for _ in terminal:
                ready.set()
            ended.append("end")
        except BaseException as failure:  # what came out of the loop is the finding
            ended.append(failure)

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    assert ready.wait(PATIENCE)
    time.sleep(0.2)  # the reader waits in the kernel
    terminal.close()
    reader.join(PATIENCE)
    assert ended == ["end"]
    until(lambda: not [p for p in anywhere.processes() if "618" in str(p.cmdline)], "the command has ended")
    terminal.close()
    with pytest.raises(errors.FailedPrecondition):
        terminal.wait()


def test_everyday_20_async_close_of_a_terminal_that_is_being_read(lab: Lab, anywhere: Sandbox) -> None:
    """Another task reads: its loop ends, and the command is killed."""

    async def scenario() -> None:
        sandbox = await AsyncSandbox.connect(anywhere.id, home=lab.home)
        terminal = await sandbox.pty("echo ready; sleep 619")
        ready = asyncio.Event()

        async def read() -> str:
            async for _ in terminal:
                ready.set()
            return "end"

        reader = asyncio.create_task(read())
        await asyncio.wait_for(ready.wait(), PATIENCE)
        await asyncio.sleep(0.2)
        await terminal.close()
        assert await asyncio.wait_for(reader, PATIENCE) == "end"
        await terminal.close()
        again = await sandbox.pty("exit 4")
        assert isinstance(done := await again.wait(), ExecResult) and done.exit_code == 4
        await again.close()
        await sandbox.close()

    asyncio.run(scenario())
    until(lambda: not [p for p in anywhere.processes() if "619" in str(p.cmdline)], "the command has ended")


def test_everyday_30_a_terminal_goes_on_without_a_viewer(anywhere: Sandbox) -> None:
    """Left and joined again, from where it was left or from its beginning; closing it again changes nothing."""
    terminal = anywhere.pty(["sh"], background=True, env={"PS1": ""})
    terminal.write("x=1; echo fi''rst\n")
    seen = read_until(terminal, b"first")
    offset = terminal.detach()
    assert offset == len(seen) and [found.command_id for found in anywhere.ptys()] == [terminal.id]
    anywhere.command(terminal.id).stdin("x=2; echo sec''ond; touch /tmp/done-30\n")
    until(lambda: anywhere.exec("test -e /tmp/done-30").ok, "it runs on")
    with anywhere.join_pty(terminal.id, offset=offset) as again:
        later = read_until(again, b"second")
        assert b"first" not in later
        again.resize(33, 99)
        again.write("stty size; echo $x en''d\n")
        assert b"33 99" in read_until(again, b"2 end")
    with anywhere.join_pty(terminal.id) as whole:
        assert read_until(whole, b"2 end").startswith(seen) and whole.lost == 0
    with anywhere.join_pty(terminal.id, offset=-1) as new:
        new.write("exit 5\n")
        assert new.wait().exit_code == 5
    assert anywhere.ptys() == []
    with anywhere.join_pty(terminal.id) as ended:  # what is kept can be read afterwards
        assert ended.wait().exit_code == 5 and ended.offset > offset


def test_everyday_30_a_terminal_without_echo(anywhere: Sandbox) -> None:
    for echo in (True, False):
        with anywhere.pty(["sh", "-c", "echo re''ady; read line; echo got $line"], echo=echo) as terminal:
            read_until(terminal, b"ready")
            terminal.write("word\n")
            assert (b"word\r\ngot" in read_until(terminal, b"got word\r\n")) is echo
            assert terminal.wait().exit_code == 0
    with anywhere.pty(["bash", "--norc", "-i"], echo=False, env={"PS1": "$ "}) as terminal:
        terminal.write("echo a''b\n")
        assert b"a''b" not in read_until(terminal, b"ab")  # bash's editor follows


def test_everyday_30_a_terminal_outlives_the_daemon(own_lab: Lab, runtime: str) -> None:
    """Killed in the middle: the terminal goes on, is joined by its id, and nothing of its output is lost."""
    sandbox = own_lab.create(runtime=runtime, name="line30")
    terminal = sandbox.pty(["sh"], background=True, env={"PS1": ""})
    terminal.write("x=kept; echo be''fore\n")
    seen = read_until(terminal, b"before\r\n")
    command = sandbox.pty("echo ready; while ! test -e /tmp/go; do sleep 0.1; done; echo mean''while", background=True)
    read_until(command, b"ready\r\n")
    os.kill(own_lab.start(), signal.SIGKILL)
    with pytest.raises(errors.AtollError):
        read_until(terminal, b"never")
    again = Sandbox.connect("line30", home=own_lab.home)
    again.exec("touch /tmp/go")
    with again.join_pty(terminal.id, offset=len(seen)) as joined:
        joined.write("echo $x af''ter\n")
        assert b"before" not in read_until(joined, b"kept after")
        joined.kill()
    with again.join_pty(command.id, offset=command.offset) as joined:
        assert b"".join(joined) == b"meanwhile\r\n" and joined.lost == 0 and joined.result is not None
    again.destroy()
    again.close()
    sandbox.close()


def test_everyday_30_what_is_no_longer_kept_is_told(lab: Lab, anywhere: Sandbox) -> None:
    """A terminal that wrote more than is kept: all bytes are either read or counted as lost."""
    line = "head -c 3000000 /dev/zero | tr '\\0' x; echo re''ady; read line"
    asked = {"command": line, "pty": {"rows": 24, "cols": 80}, "background": True, "output_limit": 1000}
    made = lab.ask("POST", f"/v1/sandboxes/{anywhere.id}/exec", asked)[1]["command_id"]
    until(lambda: anywhere.command(made).poll().stdout_bytes > 3_000_000, "it has written")
    with anywhere.join_pty(made) as terminal:
        seen = read_until(terminal, b"ready\r\n")
        assert terminal.lost > 1_000_000 and terminal.lost + len(seen) == terminal.offset == 3_000_007
        terminal.write("\n")
        assert terminal.wait().exit_code == 0


def test_everyday_30_bad_terminals(lab: Lab, anywhere: Sandbox, runtime: str) -> None:
    """Wrong types, huge values, ids of others."""
    path = f"/v1/sandboxes/{anywhere.id}"
    for pty in (
        {"rows": 0, "cols": 80}, {"rows": 24, "cols": 1 << 40}, {"rows": "24", "cols": 80}, {"echo": "no"}, {"echo": 0},
        {"echo": False, "more": 1}, [], "pty", {"rows": -1}, {"term": "a b"},
    ):  # fmt: skip
        status, answer = lab.ask("POST", f"{path}/exec", {"argv": ["true"], "pty": pty, "background": True})
        assert (status, answer["error"]["code"]) == (400, "invalid_argument"), pty
    terminal = anywhere.pty(["sleep", "620"], background=True)
    with lab.sandbox(runtime=runtime) as other:
        for wrong in (terminal.id, "nope", "../x", "a b", "x" * 5000):
            with pytest.raises((errors.NotFound, errors.InvalidArgument)):
                other.join_pty(wrong)
    for offset in ("x", "1.5", "-2", "9" * 40):
        assert lab.ask("GET", f"{path}/commands/{terminal.id}/stream?stdout={offset}")[0] == 400, offset
    foreground = anywhere.pty(["sleep", "621"])
    with pytest.raises(errors.FailedPrecondition, match="ends with its connection"):
        foreground.detach()
    foreground.close()
    terminal.kill()
    assert terminal.wait().exit_code == 137
    terminal.close()
