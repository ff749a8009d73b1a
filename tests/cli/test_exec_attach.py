"""`exec` passes everything through; `attach` is a real terminal and gives this one back as it was."""

import fcntl
import os
import pty
import select
import signal
import struct
import subprocess
import termios
import time

import pytest

from .conftest import WAIT, Cli


def test_exec_passes_streams_and_exit_code_on(cli: Cli, box: str) -> None:
    done = cli("exec", box, "sh", "-c", "echo out; echo err >&2; exit 9")
    assert (done.code, done.stdout, done.stderr) == (9, b"out\n", b"err\n")
    assert cli("exec", box, "sh", "-c", "kill -TERM $$").code == 143


def test_exec_takes_argv_as_it_is(cli: Cli, box: str) -> None:
    done = cli("exec", box, "printf", "%s|", "a b", "$HOME", "--raw", "*", "")
    assert done.stdout == b"a b|$HOME|--raw|*||"


def test_exec_flags(cli: Cli, box: str) -> None:
    done = cli("exec", "-e", "A=1", "-w", "/tmp", "-u", "nobody", box, "sh", "-c", "echo $A; pwd; id -un")
    assert done.stdout == b"1\n/tmp\nnobody\n", done


def test_exec_without_i_has_no_input_and_with_it_all(cli: Cli, box: str) -> None:
    assert cli("exec", box, "cat", stdin=b"ignored").stdout == b""
    data = os.urandom(2_000_000)
    assert cli("exec", "-i", box, "cat", stdin=data).stdout == data
    assert cli("exec", "-i", box, "true", stdin=data).code == 0  # nobody reads it


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["no-such-program-at-all"], 127),
        (["/etc/passwd"], 126),
        (["sh", "-c", "exit 255"], 255),
    ],
)
def test_exec_codes(cli: Cli, box: str, words: list[str], code: int) -> None:
    done = cli("exec", box, *words)
    assert done.code == code and (code == 255 or done.stderr)


def test_exec_own_failures_are_125_and_timeouts_124(cli: Cli, box: str) -> None:
    gone = cli("exec", "nobody-here", "true")
    assert gone.code == 125 and b"atoll:" in gone.stderr and gone.stdout == b""
    assert cli("exec", "-w", "/no/such/place", box, "true").code == 125
    assert cli("exec", "--timeout", "0.5", box, "sleep", "60").code == 124
    assert cli("exec", box).code == 2


def test_exec_detached(cli: Cli, box: str) -> None:
    done = cli("exec", "-d", box, "sh", "-c", "echo bg; exit 3")
    command = done.text.strip()
    assert done.code == 0 and command
    ended = cli.ok("sandbox", "poll", f"{box}-bg-{command}", "--follow")
    assert (ended["exit_code"], ended["stdout"]) == (3, "bg\n")


class Terminal:
    """`atoll` on a pseudo-terminal of the test's own."""

    def __init__(self, cli: Cli, *words: str, rows: int = 30, cols: int = 90) -> None:
        self.master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", rows, cols, 0, 0))
        self.before = termios.tcgetattr(slave)
        self.slave = slave
        self.seen = b""
        self.process = subprocess.Popen(
            cli.command(*words), stdin=slave, stdout=slave, stderr=slave, env={**cli.env, "TERM": "dumb"},
            start_new_session=True,
        )  # fmt: skip

    def type(self, text: str) -> None:
        os.write(self.master, text.encode())

    def until(self, text: str) -> str:
        """Read until `text` was seen; everything before it, and forget that."""
        deadline = time.monotonic() + WAIT
        while text.encode() not in self.seen:
            assert time.monotonic() < deadline, self.seen
            if select.select([self.master], [], [], 1)[0]:
                try:
                    self.seen += os.read(self.master, 65536)
                except OSError:
                    raise AssertionError(self.seen) from None
            else:
                assert self.process.poll() is None, (self.process.poll(), self.seen)
        before, _, self.seen = self.seen.partition(text.encode())
        return before.decode()

    def resize(self, rows: int, cols: int) -> None:
        fcntl.ioctl(self.slave, termios.TIOCSWINSZ, struct.pack("HHHH", rows, cols, 0, 0))
        self.process.send_signal(signal.SIGWINCH)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait(WAIT)
        os.close(self.master)
        os.close(self.slave)


@pytest.fixture
def terminal(cli: Cli, box: str):  # type: ignore[no-untyped-def]
    opened: list[Terminal] = []

    def start(*words: str, **options: int) -> Terminal:
        opened.append(Terminal(cli, *words, **options))
        return opened[-1]

    yield start
    for one in opened:
        one.close()


def test_attach_is_a_real_terminal(terminal, box: str) -> None:  # type: ignore[no-untyped-def]
    shell = terminal("attach", box)
    shell.type("echo mark-$((40+2)); tty; stty size\n")
    shell.until("mark-42")
    shell.until("/dev/pts/")
    shell.until("30 90")
    assert termios.tcgetattr(shell.slave)[3] & termios.ECHO == 0  # raw: the far side echoes
    shell.resize(41, 111)
    shell.type("while [ \"$(stty size)\" != '41 111' ]; do sleep 0.1; done; echo resized-$((1+1))\n")
    shell.until("resized-2")
    shell.type("sh -c 'echo asleep-$((2+2)); exec sleep 500'\n")  # told by a program that has the terminal already
    shell.until("asleep-4")
    shell.type("\x03")
    shell.until("^C")  # what is typed before the interrupt was taken would be thrown away with it, as on any terminal
    shell.type("echo interrupted-$((3*3))\n")
    shell.until("interrupted-9")
    shell.type("exit 7\n")
    assert shell.process.wait(WAIT) == 7
    assert termios.tcgetattr(shell.slave) == shell.before


def test_attach_gives_the_terminal_back_when_told_to_end(terminal, box: str) -> None:  # type: ignore[no-untyped-def]
    shell = terminal("attach", box, "sh", "-c", "echo up; sleep 500")
    shell.until("up")
    shell.process.terminate()
    assert shell.process.wait(WAIT) == 143
    assert termios.tcgetattr(shell.slave) == shell.before


def test_exec_on_a_terminal(terminal, box: str) -> None:  # type: ignore[no-untyped-def]
    shell = terminal("exec", "-it", box, "sh", "-c", "read line; echo got-$line; exit 4")
    shell.type("typed\n")
    shell.until("got-typed")
    assert shell.process.wait(WAIT) == 4


def test_output_without_t_cannot_steer_the_terminal(terminal, box: str) -> None:  # type: ignore[no-untyped-def]
    """ESC-16: only an attached terminal or --raw passes control characters to this one."""
    shell = terminal("exec", box, "printf", "x\\033]0;evil\\007y\\n-end-")
    assert "\x1b" not in shell.until("-end-")
    raw = terminal("exec", "--raw", box, "printf", "x\\033[31my\\n-end-")
    assert "\x1b[31m" in raw.until("-end-")


def test_everyday_30_a_kept_terminal_is_left_and_joined(terminal, cli: Cli, box: str) -> None:  # type: ignore[no-untyped-def]
    first = terminal("attach", "--keep", box, "sh")
    first.type("x=5; echo he''re-$x\n")
    first.until("here-5")
    first.type("\x10a\x10\x11")  # Ctrl-P alone is the program's
    left = first.until(" --offset")
    assert first.process.wait(WAIT) == 0 and f"atoll attach {box} --join " in left
    found = left.rpartition(" --join ")[2]
    assert cli("attach", box, "--list").text.split()[:2] == [found, "sh"]
    again = terminal("attach", box, "--join", found, "--offset", "-1", rows=44, cols=88)
    again.type("\necho aga''in-$x; stty size\n")
    again.until("again-5")
    again.until("44 88")
    again.process.send_signal(signal.SIGHUP)  # the window is closed
    assert again.process.wait(WAIT) == 128 + signal.SIGHUP
    whole = terminal("attach", box, "--join", found)
    whole.until("here-5")
    whole.until("again-5")
    whole.type("exit 7\n")
    assert whole.process.wait(WAIT) == 7
    assert cli("attach", box, "--list").text == ""
    assert cli("attach", box, "--join", "nope").code == 125
    assert cli("attach", box, "--join", found, "ls").code != 0


def test_everyday_30_a_terminal_without_echo(terminal, box: str) -> None:  # type: ignore[no-untyped-def]
    quiet = terminal("attach", "--no-echo", box, "sh", "-c", "echo re''ady; read x; echo got $x")
    quiet.until("ready")
    quiet.type("word\n")
    assert "word" not in quiet.until("got word")
    assert quiet.process.wait(WAIT) == 0
