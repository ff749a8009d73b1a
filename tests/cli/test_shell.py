"""`atoll shell`: a session by name, line by line, and one that is gone afterwards."""

from .conftest import Cli


def test_a_session_is_opened_used_and_closed(cli: Cli, box: str) -> None:
    session = cli("shell", box, "--open").stdout.decode().strip()
    assert cli("shell", box, "--session", session, "-c", "cd /tmp && export A=1").code == 0
    done = cli("shell", box, "--session", session, "-c", "pwd; echo $A; echo e >&2; (exit 4)")
    assert (done.code, done.stdout, done.stderr) == (4, b"/tmp\n1\n", b"e\n")
    assert session in cli("shell", box, "--list").stdout.decode()
    assert cli("shell", box, "--session", session, "--close").code == 0
    assert cli("shell", box, "--list").stdout == b""
    assert b"shell" in cli("shell", box, "--session", session, "-c", "true").stderr


def test_lines_are_run_one_after_another_until_the_session_ends(cli: Cli, box: str) -> None:
    done = cli("shell", box, stdin=b"x=5\necho $x\nexit 3\necho not reached\n")
    assert (done.code, done.stdout) == (3, b"5\n")
    done = cli("shell", box, "--lang", "python", stdin=b"y = 5\ny + 1\n")
    assert (done.code, done.stdout) == (0, b"6\n")


def test_without_a_sandbox_one_is_made_and_gone(cli: Cli) -> None:
    before = cli("list", "--json").stdout
    assert cli("shell", "-c", "echo fresh").stdout == b"fresh\n"
    assert cli("list", "--json").stdout == before
