"""FIL-03: /proc/1/root, /proc/self/fd/N and the like, through the agent."""

import os
import re

import pytest

from atoll import Sandbox, errors

# The host's counters of the sandbox's own memory, which the agent watches under gVisor. Everybody inside may read them.
COUNTER = re.compile(rb"\d+\s*|(cache|anon) \d+.*", re.DOTALL)


def test_they_lead_back_inside_or_nowhere(anywhere: Sandbox, runtime: str) -> None:
    """What the file operations give is never more than what a shell inside sees."""
    anywhere.exec("echo inside > /etc/hostname")
    for path in ("/proc/1/root/etc/hostname", "/proc/self/root/etc/hostname", "/proc/self/cwd/../etc/hostname"):
        try:
            seen = anywhere.files.read(path)
        except errors.AtollError:
            continue
        assert seen == b"inside\n", path
    for number in range(40):
        for pid in ("self", "1", "thread-self"):
            try:  # the agent's own sockets and pipes are not files; the sandbox's own memory counters are
                seen = anywhere.files.read(f"/proc/{pid}/fd/{number}", limit=16)
            except errors.AtollError:
                pass
            else:
                assert runtime == "gvisor" and COUNTER.fullmatch(seen), seen
            with pytest.raises(errors.AtollError):
                anywhere.files.write(f"/proc/{pid}/fd/{number}", b"x")


@pytest.mark.parametrize(
    "path", ["/proc/1/environ", "/proc/1/mem", "/proc/1/maps", "/proc/self/mem", "/proc/self/environ", "/proc/1/auxv"]
)
def test_the_agents_own_memory_is_closed(anywhere: Sandbox, runtime: str, path: str) -> None:
    """Its secret and its memory are reachable neither by its own file operations nor by root inside."""
    for number in (None, 0, 4096, 0x400000):
        try:
            seen = anywhere.files.read(path, offset=number or 0, limit=4096)
        except errors.AtollError:
            continue
        assert seen == b"", path
    if path.startswith("/proc/1/"):
        seen = anywhere.exec(["head", "-c", "4096", path]).raw_stdout
        if runtime == "gvisor" and path == "/proc/1/environ":  # gVisor shows it to root; there is nothing in it
            assert {entry.split(b"=")[0] for entry in seen.split(b"\0")} <= {b"PATH", b"HOME", b"TERM", b"LANG", b""}
        elif runtime != "gvisor" or path == "/proc/1/mem":  # gVisor also shows maps and auxv: addresses, no content
            assert seen == b"", path


def test_the_same_path_shows_the_host_outside() -> None:
    """Control: on the host, /proc/1/root and environ of one's own processes are open."""
    assert os.path.exists("/proc/self/root/etc/hostname")
    with open("/proc/self/environ", "rb") as own:
        assert own.read(1)
