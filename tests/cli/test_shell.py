"""`atoll shell`: a session by name, line by line, and one that is gone afterwards."""

from lab.terminal import Terminal

from .conftest import Cli


def test_everyday_30_a_session_is_opened_used_and_closed(cli: Cli, box: str) -> None:
    session = cli("shell", box, "--open").stdout.decode().strip()
    assert cli("shell", box, "--session", session, "-c", "cd /tmp && export A=1").code == 0
    done = cli("shell", box, "--session", session, "-c", "pwd; echo $A; echo e >&2; (exit 4)")
    assert (done.code, done.stdout, done.stderr) == (4, b"/tmp\n1\n", b"e\n")
    assert session in cli("shell", box, "--list").stdout.decode()
    assert cli("shell", box, "--session", session, "--close").code == 0
    assert cli("shell", box, "--list").stdout == b""
    assert b"shell" in cli("shell", box, "--session", session, "-c", "true").stderr


def test_everyday_30_lines_are_run_one_after_another_until_the_session_ends(cli: Cli, box: str) -> None:
    done = cli("shell", box, stdin=b"x=5\necho $x\nexit 3\necho not reached\n")
    assert (done.code, done.stdout) == (3, b"5\n")
    done = cli("shell", box, "--lang", "python", stdin=b"y = 5\ny + 1\n")
    assert (done.code, done.stdout) == (0, b"6\n")


def test_everyday_30_blocks_of_several_lines_are_one_piece(cli: Cli, box: str) -> None:
    """Piped as scripts have them, in every language; what is wrong is told by who runs it, and nothing hangs."""
    loop = b"for i in 1 2; do\necho $i\ndone\ncat <<END\nhere\nEND\necho 'a\nb'\necho c \\\nd\n"
    assert cli("shell", box, stdin=loop).stdout == b"1\n2\nhere\na\nb\nc d\n"
    python = b"def f(n):\n    if n:\n        return n * 2\n\n    return 0\n\nfor i in range(2):\n    print(f(i))\n"
    python += b"else:\n    print('end')\nf(3)\n"
    assert cli("shell", box, "--lang", "python", stdin=python).stdout == b"0\n2\nend\n6\n"
    node = b"function f(n) {\n  // not }\n  return `a\n}`.length + n;\n}\nf(1)\n"
    assert cli("shell", box, "--lang", "node", stdin=node).stdout == b"4\n"
    wrong = cli("shell", box, stdin=b"for i in 1; do\n")
    assert wrong.code == 2 and b"end of file" in wrong.stderr
    assert b"SyntaxError" in cli("shell", box, "--lang", "python", stdin=b"x = = 1\n").stderr


def test_everyday_30_a_person_types_blocks_and_gets_lines_back(cli: Cli, box: str) -> None:
    screen = Terminal(cli.command("shell", box, "--lang", "python"), {**cli.env, "TERM": "xterm"})
    screen.read_until(b"python> ")
    for line, shown in ((b"for i in range(2):", b"... "), (b"    print(i + 40)", b"... "), (b"", b"40\r\n41\r\n")):
        screen.type(line)
        screen.read_until(shown)
        screen.seen = screen.seen[-8:] if shown == b"... " else screen.seen
    screen.type(b"print(6 * 7)")
    screen.read_until(b"42\r\n")
    screen.seen = b""
    screen.type(b"\x1b[A")  # the arrow gives the last line back
    screen.read_until(b"42\r\n")
    screen.type(b"exit()")
    assert b"\\x1b" not in screen.finish()


def test_without_a_sandbox_one_is_made_and_gone(cli: Cli) -> None:
    before = cli("list", "--json").stdout
    assert cli("shell", "-c", "echo fresh").stdout == b"fresh\n"
    assert cli("list", "--json").stdout == before
