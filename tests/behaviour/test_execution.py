"""Running things, on every runtime through the SDK: what a caller is told is what happened.

The ids in the names are the promises of the K8E contract (P, D) and of agentkernel's known defects (K).
"""

import json
import signal
import threading

import pytest
from lab.sandboxes import until

from atoll import ExecResult, Output, Sandbox, errors

QUOTES = "a'b\"c $HOME `id` \\ \n\t*"


def pieces(sandbox: Sandbox, command: str, **options: object) -> tuple[bytes, bytes, ExecResult]:
    out = {"stdout": b"", "stderr": b""}
    result = None
    for item in sandbox.stream(command, **options):
        if isinstance(item, Output):
            out[item.stream] += item.data
        elif isinstance(item, ExecResult):
            result = item
    assert result is not None
    return out["stdout"], out["stderr"], result


def test_k8e_D01_ak_K2_exit_code_in_every_mode(anywhere: Sandbox) -> None:
    """`exit 7` is 7, and both streams arrive apart: waiting, streaming, in the background, on a terminal, as code."""
    line = "echo out; echo err >&2; exit 7"
    waited = anywhere.exec(line)
    assert (waited.exit_code, waited.stdout, waited.stderr, waited.status) == (7, "out\n", "err\n", "completed")
    out, err, streamed = pieces(anywhere, line)
    assert (streamed.exit_code, out, err) == (7, b"out\n", b"err\n")
    behind = anywhere.start(line).wait()
    assert (behind.exit_code, behind.stdout, behind.stderr) == (7, "out\n", "err\n")
    with anywhere.pty(["sh", "-c", line]) as terminal:
        assert terminal.wait().exit_code == 7
    assert anywhere.run("import sys; sys.exit(7)").exit_code == 7
    killed = anywhere.exec("kill -9 $$")
    assert (killed.exit_code, killed.signal) == (137, signal.SIGKILL)


def test_k8e_D02_timeouts_hold_in_every_mode(anywhere: Sandbox) -> None:
    """The time ends the whole tree, children in the background included; what was written before is there."""
    line = "echo early; sleep 613 & sleep 613"
    waited = anywhere.exec(line, timeout=3)
    assert (waited.status, waited.timed_out, waited.stdout) == ("timed_out", True, "early\n")
    out, _, streamed = pieces(anywhere, line, timeout=3)
    assert streamed.timed_out and out == b"early\n"
    behind = anywhere.start(line, timeout=3).wait()
    assert behind.timed_out and behind.stdout == "early\n"
    assert anywhere.run("import time; print('early', flush=True); time.sleep(613)", timeout=2).timed_out
    assert [p for p in anywhere.processes() if "613" in str(p.cmdline)] == []
    assert anywhere.exec("echo alive").stdout == "alive\n"


def test_k8e_D03_nothing_runs_twice(anywhere: Sandbox) -> None:
    """A command that timed out has run once, and the sandbox goes on."""
    anywhere.exec("rm -f /tmp/once")
    anywhere.exec("echo x >> /tmp/once; sleep 611", timeout=3)
    assert anywhere.exec("cat /tmp/once").stdout == "x\n"


def test_k8e_D04_floods_do_not_deadlock(anywhere: Sandbox) -> None:
    """Megabytes on both streams at once are counted to the byte and none blocks the other."""
    code = "import sys\nfor _ in range(64):\n sys.stdout.write('o'*65536); sys.stderr.write('e'*65536)"
    result = anywhere.run(code, output_limit=8 << 20, timeout=None)
    assert (result.stdout_bytes, result.stderr_bytes, result.truncated) == (4 << 20, 4 << 20, False)
    assert set(result.stdout) == {"o"} and set(result.stderr) == {"e"}
    cut = anywhere.run(code, output_limit=1000, timeout=None)
    assert cut.truncated and cut.stdout_bytes == 4 << 20 and len(cut.stdout) <= 1000


def test_k8e_D05_bytes_pass_intact(anywhere: Sandbox) -> None:
    """Every byte value, in output and in files."""
    every = bytes(range(256)) * 3
    anywhere.files.write("/workspace/every", every)
    assert anywhere.files.read("/workspace/every") == every
    assert anywhere.exec("cat /workspace/every; cat /workspace/every >&2").raw_stdout == every
    assert anywhere.exec(["cat"], stdin=every).raw_stdout == every


def test_k8e_D06_long_commands(anywhere: Sandbox) -> None:
    """64 KiB in an argument and a megabyte of code run; what no kernel takes is refused or a result, never a hang."""
    assert anywhere.exec(["printf", "%s", "x" * 65536]).stdout == "x" * 65536
    code = "x = '" + "y" * 1_000_000 + "'\nprint(len(x))"
    assert anywhere.run(code).stdout == "1000000\n"
    try:
        result = anywhere.exec(["true", "z" * 300_000])
    except errors.InvalidArgument:
        pass
    else:
        assert result.exit_code not in (0, None) or result.ok


def test_k8e_D07_errors_are_typed(anywhere: Sandbox) -> None:
    """Each wrong request says what is wrong and the sandbox can be used on."""
    with pytest.raises(errors.FileNotFound):
        anywhere.files.read("/workspace/missing")
    with pytest.raises(errors.FileExists):
        anywhere.files.mkdir("/tmp", parents=False)
    with pytest.raises(errors.IsADirectory):
        anywhere.files.read("/tmp")
    with pytest.raises(errors.AtollError):
        anywhere.files.write("/proc/version", b"x")
    done = anywhere.start("true")
    done.wait()
    with pytest.raises((errors.Conflict, errors.NotFound)):
        done.signal(15)
    odd = "/workspace/ a'b\"$`\\;*\n\u00e9"
    anywhere.files.write(odd, b"odd")
    assert anywhere.files.read(odd) == b"odd"
    anywhere.files.remove(odd)
    assert anywhere.exec("true").ok


def test_k8e_D08_processes_under_load(anywhere: Sandbox) -> None:
    """The list is right while things start and end, and its command lines are the real ones."""
    burst = anywhere.start("for i in $(seq 100); do /bin/true; done; exec sleep 617")
    for _ in range(20):
        assert all(p.pid > 0 and p.comm for p in anywhere.processes())
    slept = until(lambda: [p for p in anywhere.processes() if p.comm == "sleep"], "the sleeper is listed")
    assert [list(p.cmdline) for p in slept if "617" in p.cmdline] == [["sleep", "617"]]
    burst.kill()
    assert burst.wait().exit_code == 137


def test_k8e_D09_blank_lines_survive(anywhere: Sandbox) -> None:
    """A stream is the bytes as they were, with the two streams apart."""
    out, err, _ = pieces(anywhere, r"printf '\n\na\n\n\nb\n\n'; printf '\n\n' >&2")
    assert (out, err) == (b"\n\na\n\n\nb\n\n", b"\n\n")


def test_k8e_D10_a_child_with_the_pipe_delays_nothing(anywhere: Sandbox) -> None:
    """The result is there when the command is over; a missing directory is an error."""
    result = anywhere.exec("sleep 619 & echo done", timeout=60)
    assert (result.stdout, result.status, result.exit_code) == ("done\n", "completed", 0)
    anywhere.exec("pkill -f 'sleep 619'")
    with pytest.raises((errors.NotFound, errors.InvalidArgument, errors.FileError)):
        anywhere.exec("true", cwd="/no/such/place")


def test_k8e_D11_environment(anywhere: Sandbox) -> None:
    """What programs need is set, and a terminal finds its program on PATH."""
    code = "import os, json; print(json.dumps({k: os.environ.get(k) for k in ('HOME','LANG','TERM','PATH')}))"
    found = json.loads(anywhere.run(code).stdout)
    assert all(found.values()), found
    assert "/usr/bin" in found["PATH"].split(":")
    with anywhere.pty(["true"]) as terminal:
        assert terminal.wait().exit_code == 0


def test_k8e_D26_ak_K1_words_arrive_literally(anywhere: Sandbox) -> None:
    """Quotes, spaces, newlines and dollars in argv, in code, in the environment and on stdin."""
    assert anywhere.exec(["printf", "%s", QUOTES]).stdout == QUOTES
    assert anywhere.run(f"print({QUOTES!r}, end='')").stdout == QUOTES
    assert anywhere.run("import sys; print(sys.argv[1], end='')", args=[QUOTES]).stdout == QUOTES
    assert anywhere.exec(["sh", "-c", 'printf %s "$ODD"'], env={"ODD": QUOTES}).stdout == QUOTES
    assert anywhere.exec(["cat"], stdin=QUOTES).stdout == QUOTES


def test_k8e_D27_parallel_runs_do_not_mix(anywhere: Sandbox) -> None:
    """Eight multi-line programs at once each get their own output."""
    results: dict[int, str] = {}

    def one(number: int) -> None:
        code = f"import time\nfor _ in range(5):\n  print({number}, flush=True)\n  time.sleep(0.01)\n"
        results[number] = anywhere.run(code).stdout

    threads = [threading.Thread(target=one, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {n: f"{n}\n" * 5 for n in range(8)}


def test_k8e_D29_a_sixth_background_run(anywhere: Sandbox) -> None:
    """Finished ones do not count."""
    for number in range(6):
        assert anywhere.start(f"exit {number}").wait().exit_code == number


def test_ak_K3_no_command_can_spoil_the_next(anywhere: Sandbox) -> None:
    """Marker text, a program that reads stdin, one that never ends: the next command is not touched."""
    marker = '\x04__ATOLL_END__\r\n\x1b]0;x\x07{"exit_code": 0}\n\x00\x01\x02'
    assert anywhere.exec(["sh", "-c", 'printf "%b" "$M"; exit 5'], env={"M": "\\0004 exit_code=0"}).exit_code == 5
    assert anywhere.run(f"import sys; sys.stdout.write({marker!r}); sys.exit(4)").exit_code == 4
    assert anywhere.exec(["cat"]).stdout == ""  # its stdin is empty and closed, not the channel
    assert anywhere.exec("read x; echo [$x]").stdout == "[]\n"
    assert anywhere.exec("while :; do :; done", timeout=1).timed_out
    assert anywhere.exec(["sh", "-c", "trap '' TERM INT HUP; while :; do :; done"], timeout=1).timed_out
    assert anywhere.exec("echo clean").stdout == "clean\n"
