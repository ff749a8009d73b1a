"""RES-05: floods of output: two at once, one line without end, a reader that is slow, a reader that leaves."""

import time

from lab.sandboxes import Lab, until

from atoll import ExecResult, Output, Sandbox


def resident_kb(pid: int) -> int:
    with open(f"/proc/{pid}/status") as file:
        return int(file.read().split("VmRSS:")[1].split()[0])


def test_the_daemon_stays_flat_and_others_are_served(lab: Lab, anywhere: Sandbox) -> None:
    """`yes` on both streams and 64 MB in one line: counted, cut with a flag, in bounded memory."""
    daemon = lab.start()
    anywhere.exec("true")
    before = resident_kb(daemon)
    flood = anywhere.start("yes & yes >&2")
    line = anywhere.exec("head -c 67108864 /dev/zero | tr '\\0' x", timeout=None)
    assert (line.stdout_bytes, line.truncated) == (67108864, True) and set(line.stdout) == {"x"}
    assert lab.ask("GET", "/v1/health")[0] == 200 and anywhere.exec("echo other").stdout == "other\n"
    assert resident_kb(daemon) - before < 96 * 1024
    flood.kill()
    assert flood.wait().exit_code == 137


def test_a_slow_reader_gets_every_byte(anywhere: Sandbox) -> None:
    """The process waits for the reader; nothing is lost in between."""
    code = "import sys\nfor n in range(200000): sys.stdout.write('%08d\\n' % n)"
    seen = b""
    for item in anywhere.stream(["python3", "-c", code], timeout=None, output_limit=100):
        if isinstance(item, Output):
            seen += item.data
            if len(seen) < 200_000:
                time.sleep(0.02)
        elif isinstance(item, ExecResult):
            assert item.ok
    assert seen == b"".join(b"%08d\n" % n for n in range(200000))


def test_a_reader_that_leaves_takes_its_command_along(anywhere: Sandbox) -> None:
    """An abandoned stream does not keep a flood alive."""
    stream = anywhere.stream("exec -a flooder yes", timeout=None)
    for item in stream:
        if isinstance(item, Output):
            break
    stream.close()
    until(lambda: not [p for p in anywhere.processes() if "flooder" in str(p.cmdline)], "the flood has ended")
    assert anywhere.exec("echo on").stdout == "on\n"
