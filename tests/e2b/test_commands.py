"""The class Commands of the stock Python SDK."""

import threading
from typing import Any

import pytest
from e2b import (
    CommandExitException,
    InvalidArgumentException,
    NotFoundException,
    SandboxException,
    TimeoutException,
)
from e2b.exceptions import AuthenticationException
from lab.waiting import until


def test_output_exit_and_environment(box: Any) -> None:
    told: list[str] = []
    done = box.commands.run("echo out; echo err >&2; id -un; pwd; echo $FOO $X", envs={"X": "y"}, on_stdout=told.append)
    assert done.stdout == "out\nuser\n/home/user\nbar y\n" and done.stderr == "err\n" and done.exit_code == 0
    assert "".join(told) == done.stdout
    assert box.commands.run("id -un; echo $HOME; pwd", user="root", cwd="/tmp").stdout == "root\n/root\n/tmp\n"
    assert box.commands.run("echo $E2B_SANDBOX $E2B_SANDBOX_ID $E2B_TEMPLATE_ID").stdout.split() == [
        "true", box.sandbox_id, "base",
    ]  # fmt: skip
    with pytest.raises(CommandExitException) as failed:
        box.commands.run("echo no >&2; exit 7")
    assert failed.value.exit_code == 7 and failed.value.stderr == "no\n"


def test_much_output_arrives_whole(box: Any) -> None:
    done = box.commands.run("head -c 3000000 /dev/zero | tr '\\0' x; echo; echo end", timeout=0)
    assert len(done.stdout) == 3000005 and done.stdout.endswith("x\nend\n")


def test_what_cannot_start_is_told(box: Any) -> None:
    with pytest.raises(InvalidArgumentException):
        box.commands.run("true", cwd="/nowhere")
    with pytest.raises(AuthenticationException):
        box.commands.run("true", user="nobody-here")


def test_the_timeout_ends_the_process(box: Any) -> None:
    with pytest.raises(TimeoutException):
        box.commands.run("sleep 1000", timeout=1)
    until(lambda: box.commands.list() == [], "the process is gone")


def test_background_input_and_signals(box: Any) -> None:
    running = box.commands.run("cat; echo over", background=True, stdin=True)
    assert running.pid in [one.pid for one in box.commands.list()]
    box.commands.send_stdin(running.pid, "first\n")
    box.commands.stream_input(running.pid, [b"second\n", b"third\n"])
    box.commands.close_stdin(running.pid)
    assert running.wait().stdout == "first\nsecond\nthird\nover\n"

    sleeper = box.commands.run("sleep 1000", background=True)
    assert box.commands.kill(sleeper.pid) is True and box.commands.kill(sleeper.pid) is False
    with pytest.raises(CommandExitException) as killed:
        sleeper.wait()
    assert killed.value.exit_code == -1 and "killed" in (killed.value.error or "")
    assert box.commands.run(f"kill -0 {sleeper.pid} || echo gone").stdout.endswith("gone\n")
    with pytest.raises(NotFoundException):
        box.commands.send_stdin(4_000_000, "x")


def test_reconnecting(box: Any) -> None:
    first = box.commands.run("echo early; read x; echo got $x", background=True, stdin=True)
    assert next(iter(first))[0] == "early\n"
    first.disconnect()
    assert first.pid in [one.pid for one in box.commands.list()], "leaving does not end it"
    second = box.commands.connect(first.pid)
    third = box.commands.connect(first.pid)
    box.commands.send_stdin(first.pid, "it\n")
    assert second.wait().stdout == "got it\n" and third.wait().stdout == "got it\n", "no replay, all who read get it"
    assert box.commands.connect(first.pid).wait().exit_code == 0, "its end is remembered"
    with pytest.raises(NotFoundException):
        box.commands.connect(4_000_000)


def test_many_at_once(box: Any) -> None:
    found: dict[int, str] = {}

    def run(number: int) -> None:
        found[number] = box.commands.run(f"echo {number}").stdout

    threads = [threading.Thread(target=run, args=(number,)) for number in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {number: f"{number}\n" for number in range(12)}


def test_a_terminal(box: Any) -> None:
    from e2b import PtySize

    terminal = box.pty.create(PtySize(rows=24, cols=80), cwd="/tmp", envs={"WHERE": "here"}, timeout=0)
    heard: list[bytes] = []
    box.pty.send_stdin(terminal.pid, b"stty size; echo $TERM-$WHERE; pwd; touch /tmp/typed\n")
    until(lambda: box.files.exists("/tmp/typed"), "the line was run")
    box.pty.resize(terminal.pid, PtySize(rows=30, cols=100))
    box.pty.stream_input(terminal.pid, [b"stty size\n"])
    again = box.pty.connect(terminal.pid)
    box.pty.send_stdin(terminal.pid, b"exit 3\n")
    with pytest.raises(CommandExitException) as ended:
        terminal.wait(on_pty=heard.append)
    text = b"".join(heard).decode()
    assert ended.value.exit_code == 3
    assert "24 80" in text and "30 100" in text and "xterm-256color-here" in text and "/tmp" in text
    with pytest.raises(CommandExitException):
        again.wait()
    other = box.pty.create(PtySize(rows=24, cols=80))
    assert box.pty.kill(other.pid) is True and box.pty.kill(other.pid) is False
    with pytest.raises(SandboxException):
        box.commands.close_stdin(other.pid)
