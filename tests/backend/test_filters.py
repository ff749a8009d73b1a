"""The filter of system calls that an agent installs: it says the same as the profile an engine is given, number by number."""

import errno
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from lab.direct import answer

from atoll.backends.local.kernel import filters, seccomp
from atoll.backends.local.kernel.syscalls import AUDIT_ARCHITECTURES, machine_name, numbers

HEADER = Path("/usr/include/x86_64-linux-gnu/asm/unistd_64.h")
FILTERS = ("default", "moderate", "ai-agent", "restrictive")
ALLOW, REFUSE = 0x7FFF_0000, 0x0005_0000 | errno.EPERM

ASK = """
import ctypes, errno, json, os
libc = ctypes.CDLL(None, use_errno=True)
def said(*call):
    ctypes.set_errno(0)
    return 0 if libc.syscall(*call) >= 0 else ctypes.get_errno()
print(json.dumps({name: said(*call) for name, call in %r.items()}))
"""


def run(program: bytes, number: int, first: int = 0, arch: int | None = None) -> int:
    """What the kernel would answer, on this machine unless another is named."""
    return answer(program, number, AUDIT_ARCHITECTURES[machine_name()] if arch is None else arch, first)


@pytest.mark.parametrize("name", FILTERS)
def test_the_program_says_what_the_profile_says(name: str) -> None:
    known, program = numbers(), filters.program(name)
    allowed = {known[call] for call in seccomp.allowed(name) if call in known} - {
        known[call] for call in seccomp.ABSENT_INSIDE
    }
    judged = {known[call] for call in ("clone", "socket", "personality")}
    errors = {known[call]: error for call, error in seccomp.ABSENT_INSIDE.items()}
    for number in [*range(1024), 0x4000_0000, 0x4000_0000 | known["read"], 0xFFFF_FFFF]:
        if number in judged:
            continue
        expected = ALLOW if number in allowed else 0x0005_0000 | errors.get(number, errno.EPERM)
        assert run(program, number) == expected, number
    assert run(program, known["read"], arch=0x4000_0003) == REFUSE  # the 32-bit entry


def test_arguments_are_compared_in_full() -> None:
    known, program = numbers(), filters.program()
    for family in seccomp.SOCKET_FAMILIES:
        assert run(program, known["socket"], family) == ALLOW
        assert run(program, known["socket"], family | 1 << 40) == REFUSE
    for family in (0, 3, 17, 38, 40, 0xFFFF_FFFF):
        assert run(program, known["socket"], family) == REFUSE
    for value in seccomp.PERSONALITIES:
        assert run(program, known["personality"], value) == ALLOW
    assert run(program, known["personality"], 0x40_0000) == REFUSE
    assert run(program, known["clone"], 0x11) == ALLOW
    for bit in range(64):
        expected = REFUSE if seccomp.NAMESPACE_FLAGS >> bit & 1 else ALLOW
        assert run(program, known["clone"], 1 << bit) == expected, bit


@pytest.mark.skipif(not HEADER.exists(), reason="the kernel's headers are not installed")
def test_the_numbers_are_the_kernels() -> None:
    said = dict(re.findall(r"#define __NR_(\w+) (\d+)", HEADER.read_text()))
    wrong = {name: number for name, number in numbers("x86_64").items() if int(said.get(name, number)) != number}
    assert not wrong
    assert seccomp.allowed("default") <= set(numbers("x86_64"))


def test_both_tables_count_up() -> None:
    for machine in ("x86_64", "aarch64"):
        table = numbers(machine)
        assert len(set(table.values())) == len(table)
        assert list(table.values()) == sorted(table.values())


async def test_a_gvisor_sandbox_is_under_it(make: Any) -> None:
    """With the errors that programs take well, which a filter of the engine's could not give."""
    if shutil.which("runsc") is None:
        pytest.skip("runsc is not installed")
    sandbox = await make(runtime="gvisor")
    if machine_name() != "x86_64":
        pytest.skip("numbers of another architecture")
    calls = {
        "unshare": (272, 0x1000_0000),
        "mount": (165, 0, 0, 0, 0, 0),
        "unknown": (9999,),
        "keyctl": (250, 0),
        "vsock": (41, 40, 1, 0),
        "packet": (41, 17, 3, 0),
        "clone3": (435, 0, 0),
        "unix": (41, 1, 1, 0),
        "getpid": (39,),
    }
    told = json.loads((await sandbox.python(ASK % calls)).stdout)
    refused = dict.fromkeys(("unshare", "mount", "unknown", "keyctl", "vsock", "packet"), errno.EPERM)
    assert told == {**refused, "clone3": errno.ENOSYS, "unix": 0, "getpid": 0}
    status = await sandbox.sh("grep -E '^(Seccomp|NoNewPrivs)' /proc/self/status")
    assert "Seccomp:\t2" in status.stdout, status
