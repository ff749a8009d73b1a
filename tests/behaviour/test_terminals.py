"""Terminals and jobs: signals reach the foreground, a stopped job ends nothing, a terminal can be closed while it is read."""

import asyncio
import signal
import threading
import time

import pytest
from lab.sandboxes import PATIENCE, Lab, until

from atoll import AsyncSandbox, ExecResult, Sandbox, errors
from atoll.client._sync.sandbox import Pty

CATCHES = "trap 'echo caught %(name)s; exit 3' %(name)s; echo re''ady; while :; do sleep 0.05; done"


def read_until(terminal: Pty, text: bytes) -> bytes:
    seen = b""
    for piece in terminal:
        seen += piece
        if text in seen:
            return seen
    raise AssertionError(f"the terminal ended: {seen!r}")


@pytest.mark.parametrize("name", ["INT", "QUIT", "TERM"])
def test_signal_to_the_foreground_reaches_the_only_group(anywhere: Sandbox, name: str) -> None:
    """A program alone on its terminal gets the signal, by key or not."""
    with anywhere.pty(["sh", "-c", CATCHES % {"name": name}]) as terminal:
        read_until(terminal, b"ready")
        terminal.signal(getattr(signal, f"SIG{name}"))
        assert b"caught " + name.encode() in read_until(terminal, b"caught")
        assert terminal.wait().exit_code == 3


def test_signal_to_the_foreground_reaches_a_job_of_an_interactive_shell(anywhere: Sandbox) -> None:
    """The foreground is the shell's job, not the shell, which ignores SIGINT and lives on."""
    with anywhere.pty(["bash", "--norc", "-i"]) as terminal:
        terminal.write('sh -c "' + CATCHES % {"name": "INT"} + '"\n')
        read_until(terminal, b"ready")
        anywhere.command(terminal.id).signal(signal.SIGINT, group="foreground")
        read_until(terminal, b"caught INT")
        terminal.write("echo al''ive\n")
        read_until(terminal, b"alive")


def test_signal_to_an_unknown_foreground_is_refused_and_not_lost(anywhere: Sandbox) -> None:
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


def test_a_job_that_is_stopped_does_not_end_the_command(anywhere: Sandbox) -> None:
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


def test_signals_to_a_session_spare_what_watches_it(anywhere: Sandbox) -> None:
    """`group="session"` reaches the command and its children, and the exit is still told."""
    command = anywhere.start("sleep 617 & sleep 617; wait")
    until(lambda: sum("sleep 617" in " ".join(p.cmdline) for p in anywhere.processes()) >= 2, "both sleep")
    command.signal(signal.SIGTERM, group="session")
    assert command.wait().exit_code == 143
    until(lambda: not [p for p in anywhere.processes() if "617" in " ".join(p.cmdline)], "all have ended")


def test_close_of_a_terminal_that_is_being_read(anywhere: Sandbox) -> None:
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


def test_async_close_of_a_terminal_that_is_being_read(lab: Lab, anywhere: Sandbox) -> None:
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
