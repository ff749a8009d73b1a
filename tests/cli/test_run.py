"""`sandbox run` on real sandboxes: P01 to P08 and the execution defects that must not come back."""

import base64
import os
import shlex
import signal
import subprocess
import threading
import time

import pytest

from .conftest import WAIT, Cli


def test_k8e_P01_hello_without_any_setup(fresh: Cli) -> None:
    done = fresh("sandbox", "run", "print('hello')", "--lang", "python")
    assert done.code == 0, done
    answer = done.json
    assert answer["stdout"] == "hello\n" and answer["stderr"] == "" and answer["exit_code"] == 0
    assert answer["session_id"].startswith("sess-")
    assert done.stdout == done.stdout.strip() + b"\n" and b": " not in done.stdout.replace(b"hello", b"")


@pytest.mark.parametrize(
    ("language", "code", "expected"),
    [
        (None, 'echo "$BASH_VERSION" | cut -c1', "5\n"),
        ("bash", "echo ${#FUNCNAME[@]}", "0\n"),
        ("python", "import sys; print(sys.version_info[0])", "3\n"),
        ("python3", "print(2)", "2\n"),
        ("py", "print(3)", "3\n"),
        ("node", "console.log(1+1)", "2\n"),
        ("js", "console.log(typeof process)", "object\n"),
        ("ts", "const x: number = 6; console.log(x * 7)", "42\n"),
        ("typescript", "interface A { b: string }\nconst a: A = { b: 'ts' }\nconsole.log(a.b)\n", "ts\n"),
        ("python", "for i in range(2):\n    print(i)\n", "0\n1\n"),
        ("node", "const a = 1\nconsole.log(a)\n", "1\n"),
        ("bash", "for i in 1 2\ndo\n echo $i\ndone", "1\n2\n"),
    ],
)
def test_k8e_P02_P04_languages_and_lines(cli: Cli, box: str, language: str | None, code: str, expected: str) -> None:
    flags = ["--lang", language] if language else []
    answer = cli.ok("sandbox", "run", code, "--session-id", box, *flags)
    assert (answer["stdout"], answer["language"]) == (expected, language or "bash")


def test_k8e_P03_argument_beats_stdin_and_stdin_is_code(cli: Cli, box: str) -> None:
    heredoc = b"for i in range(10):\n    print(i)\n"
    answer = cli.ok("sandbox", "run", "--lang", "python", "--session-id", box, stdin=heredoc)
    assert answer["stdout"] == "".join(f"{i}\n" for i in range(10))
    assert cli.ok("sandbox", "run", "echo arg", "--session-id", box, stdin=b"echo stdin")["stdout"] == "arg\n"


def test_k8e_P05_D01_exit_code_and_both_streams(cli: Cli, box: str) -> None:
    done = cli("sandbox", "run", "echo out; echo err >&2; exit 7", "--session-id", box)
    assert done.code == 7
    answer = done.json
    assert (answer["stdout"], answer["stderr"], answer["exit_code"]) == ("out\n", "err\n", 7)
    assert answer["status"] == "completed" and answer["truncated"] is False and answer["duration_ms"] >= 0
    raw = cli("sandbox", "run", "echo out; echo err >&2; exit 7", "--session-id", box, "--raw")
    assert (raw.code, raw.stdout, raw.stderr) == (7, b"out\n", b"err\n")
    killed = cli("sandbox", "run", "kill -9 $$", "--session-id", box)
    assert killed.code == 137 and killed.json["exit_code"] == 137


def test_k8e_P06_raw_shows_the_first_line_before_the_end(cli: Cli, box: str) -> None:
    """The command waits for a file that is made only after its first line was seen."""
    code = "echo first; while [ ! -e /workspace/go ]; do sleep 0.05; done; echo second; exit 3"
    process = cli.popen(
        "sandbox", "run", code, "--raw", "--session-id", box, "--timeout", "120", stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"first\n"
    cli.ok("sandbox", "write", box, "/workspace/go", stdin=b"")
    assert process.stdout.read() == b"second\n"
    assert process.wait(WAIT) == 3


@pytest.mark.parametrize("flags", [[], ["--raw"]])
def test_k8e_P07_D02_a_timeout_kills_everything_and_returns_what_came(cli: Cli, box: str, flags: list[str]) -> None:
    code = "echo before; (setsid sleep 987 &) ; sleep 987"
    done = cli("sandbox", "run", code, "--session-id", box, "--timeout", "1", *flags)
    assert done.code == 1, done
    if flags:
        assert done.stdout == b"before\n" and b"timed out" in done.stderr
    else:
        answer = done.json
        assert (answer["stdout"], answer["status"], answer["exit_code"]) == ("before\n", "timed_out", -1)
    processes = cli.ok("sandbox", "ps", box)["processes"]
    assert not [p for p in processes if p["comm"] == "sleep"], processes
    assert cli.ok("sandbox", "run", "echo alive", "--session-id", box)["stdout"] == "alive\n"


@pytest.mark.parametrize("size", [3_000_000])
def test_k8e_D04_floods_on_both_streams_do_not_deadlock(cli: Cli, box: str, size: int) -> None:
    code = f"head -c {size} /dev/zero | tr '\\0' e >&2 & head -c {size} /dev/zero | tr '\\0' o; wait"
    done = cli("sandbox", "run", code, "--session-id", box, "--raw", "--timeout", "120")
    assert (done.code, len(done.stdout), len(done.stderr)) == (0, size, size)
    answer = cli.ok("sandbox", "run", code, "--session-id", box, "--timeout", "120")
    assert answer["truncated"] is True and len(answer["stdout"]) <= 1 << 20


def test_k8e_D05_odd_bytes_pass_intact(cli: Cli, box: str) -> None:
    code = r"printf '\000\033[31m\377\376\n'"
    data = b"\x00\x1b[31m\xff\xfe\n"
    assert cli("sandbox", "run", code, "--session-id", box, "--raw").stdout == data
    done = cli("sandbox", "run", code, "--session-id", box)
    assert base64.b64decode(done.json["stdout_b64"]) == data
    assert all(byte >= 32 or byte == 10 for byte in done.stdout)  # ESC-16: nothing that steers a terminal


def test_k8e_D06_large_code(cli: Cli, box: str) -> None:
    """64 KiB and more run, on every way in; 10 MB runs or is refused with a reason."""
    argument = "x='" + "a" * 70_000 + "'\necho ${#x}"
    assert cli.ok("sandbox", "run", argument, "--session-id", box)["stdout"] == "70000\n"
    one_line = "x='" + "b" * 300_000 + "'; print(len(x))"
    answer = cli.ok("sandbox", "run", "--lang", "python", "--session-id", box, stdin=one_line.encode())
    assert answer["stdout"] == "300000\n"
    huge = b"x = '" + b"c" * 10_000_000 + b"'\nprint(len(x))\n"
    done = cli("sandbox", "run", "--lang", "python", "--session-id", box, stdin=huge)
    assert done.json.get("stdout") == "10000000\n" or done.json["error"] in ("invalid_argument", "too_large"), done
    assert cli.ok("sandbox", "run", "echo alive", "--session-id", box)["stdout"] == "alive\n"


def test_k8e_D09_blank_lines_survive(cli: Cli, box: str) -> None:
    done = cli("sandbox", "run", "printf 'a\\n\\n\\nb\\n\\n'", "--session-id", box, "--raw")
    assert done.stdout == b"a\n\n\nb\n\n"


def test_k8e_D10_a_child_that_holds_stdout_delays_nothing(cli: Cli, box: str) -> None:
    answer = cli.ok("sandbox", "run", "sleep 600 & echo done", "--session-id", box, "--timeout", "300")
    assert answer["stdout"] == "done\n" and answer["status"] == "completed" and answer["duration_ms"] < 300_000


def test_k8e_D11_the_environment_is_set(cli: Cli, box: str) -> None:
    code = 'for v in HOME LANG TERM PATH; do [ -n "${!v}" ] || echo "$v missing"; done; pwd'
    assert cli.ok("sandbox", "run", code, "--session-id", box)["stdout"] == "/workspace\n"


@pytest.mark.parametrize("language", ["python", "node"])
def test_k8e_D26_code_arrives_literally(cli: Cli, box: str, language: str) -> None:
    text = '$HOME `id` \\"q\\" \\\\ ! % {}'
    show = "print" if language == "python" else "console.log"
    answer = cli.ok("sandbox", "run", f'{show}("{text}")', "--session-id", box, "--lang", language)
    assert answer["stdout"] == '$HOME `id` "q" \\ ! % {}\n'


def test_k8e_D27_parallel_runs_in_one_session_do_not_mix(cli: Cli, box: str) -> None:
    found: dict[int, str] = {}

    def work(number: int) -> None:
        code = f"import time\nfor i in range(5):\n    print({number})\n    time.sleep(0.05)\n"
        found[number] = cli.ok("sandbox", "run", code, "--lang", "python", "--session-id", box)["stdout"]

    threads = [threading.Thread(target=work, args=(n,)) for n in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT)
    assert found == {n: f"{n}\n" * 5 for n in range(6)}


def test_k8e_D27_D29_background_runs(cli: Cli, tenant: str) -> None:
    """Multi-line code in the background, poll, and a sixth run after five have ended."""
    for number in range(6):
        started = cli.ok(
            "sandbox", "run", f"sleep 0.1\necho n{number}\nexit {number}", "--background", "--tenant", tenant
        )
        assert started["status"] == "started" and started["session_id"].startswith("sess-")
        ended = cli.ok("sandbox", "poll", started["run_id"], "--follow")
        assert (ended["status"], ended["stdout"], ended["exit_code"]) == ("completed", f"n{number}\n", number)
    assert cli("sandbox", "poll", started["run_id"].rpartition("-bg-")[0] + "-bg-cnothing").code == 1
    assert cli("sandbox", "poll", "nonsense").json["error"] == "invalid_argument"


def wait_for(check: object, seconds: float = 60) -> None:
    until = time.monotonic() + seconds
    while not check():  # type: ignore[operator]
        assert time.monotonic() < until
        time.sleep(0.05)


def sleepers(cli: Cli, box: str, number: str) -> list[object]:
    processes = cli.ok("sandbox", "ps", box)["processes"]
    return [p for p in processes if number in str(p.get("cmdline", "")) and p["comm"] == "sleep"]


@pytest.mark.parametrize("flags", [[], ["--raw"]])
def test_interrupting_kills_the_command_and_exits_130(cli: Cli, box: str, flags: list[str]) -> None:
    number = f"8{os.getpid()}{len(flags)}"
    process = cli.popen("sandbox", "run", f"sleep {number}", "--session-id", box, "--timeout", "600", *flags,
                        stdout=subprocess.PIPE, stderr=subprocess.PIPE)  # fmt: skip
    wait_for(lambda: sleepers(cli, box, number))
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=WAIT)
    assert process.returncode == 130 and b"Traceback" not in err + out
    wait_for(lambda: not sleepers(cli, box, number))


def test_a_killed_caller_takes_its_command_along(cli: Cli, box: str) -> None:
    number = f"9{os.getpid()}"
    process = cli.popen("sandbox", "run", f"sleep {number}", "--session-id", box, "--timeout", "600")
    wait_for(lambda: sleepers(cli, box, number))
    process.kill()
    process.wait(WAIT)
    wait_for(lambda: not sleepers(cli, box, number))


def test_a_reader_that_goes_away_is_no_traceback(cli: Cli, box: str) -> None:
    words = shlex.join(cli.command("sandbox", "run", "yes", "--raw", "--session-id", box))
    done = subprocess.run(["bash", "-c", f"{words} | head -1"], env=cli.env, capture_output=True, timeout=WAIT)
    assert done.stdout == b"y\n" and done.stderr == b""
