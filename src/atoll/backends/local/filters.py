"""The filter of system calls as a program for the kernel, for a sandbox whose agent installs it itself.

gVisor builds the filter of an OCI configuration anew at each start, which takes longer than all of the agent's own start, and makes
EPERM of every error such a filter names. Its kernel takes a ready program as any Linux does. The agent installs this one before it
listens to anybody, so everything that ever runs in the sandbox is under it.
"""

import errno
import struct
from functools import cache

from atoll.backends.local import seccomp
from atoll.backends.local.syscalls import AUDIT_ARCHITECTURES, machine_name, numbers

_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _ERRNO = 0x7FFF_0000, 0x0005_0000
_NUMBER_AT, _ARCH_AT, _ARGUMENT_AT = 0, 4, 16  # in the kernel's struct seccomp_data

Step = tuple[int, int, int, int]
Code = list[Step]


def _end(error: int = 0) -> Code:
    return [(_RETURN, 0, 0, _ERRNO | error if error else _ALLOW)]


_REFUSE = _end(errno.EPERM)


@cache
def program(name: str = "default") -> bytes:
    """An array of `struct sock_filter`, in the order of bytes of the machine itself."""
    steps: Code = [
        (_LOAD, 0, 0, _ARCH_AT),
        (_EQUAL, 1, 0, AUDIT_ARCHITECTURES[machine_name()]),
        *_REFUSE,
        (_LOAD, 0, 0, _NUMBER_AT),
        *_choose(_ranges(_verdicts(name))),
    ]
    return b"".join(struct.pack("=HBBI", *step) for step in steps)


def _verdicts(name: str) -> dict[int, Code]:
    known = numbers()
    found = {known[call]: _end() for call in seccomp.allowed(name) if call in known}
    found |= {known[call]: _end(error) for call, error in seccomp.ABSENT_INSIDE.items()}
    found[known["clone"]] = [(_LOAD, 0, 0, _ARGUMENT_AT), (_ANY_BIT, 0, 1, seccomp.NAMESPACE_FLAGS), *_REFUSE, *_end()]
    found[known["socket"]] = _one_of(seccomp.SOCKET_FAMILIES)
    found[known["personality"]] = _one_of(seccomp.PERSONALITIES)
    return found


def _one_of(values: tuple[int, ...]) -> Code:
    """Whether the first argument, all 64 bits of it, is one of these."""
    compared: Code = [(_EQUAL, len(values) - index, 0, value) for index, value in enumerate(values)]
    return [
        *((_LOAD, 0, 0, _ARGUMENT_AT + 4), (_EQUAL, 1, 0, 0), *_REFUSE, (_LOAD, 0, 0, _ARGUMENT_AT)),
        *(*compared, *_REFUSE, *_end()),
    ]


def _ranges(verdicts: dict[int, Code]) -> list[tuple[int, Code]]:
    """(first number, what to do) for every stretch of numbers with the same answer."""
    found: list[tuple[int, Code]] = []
    for number in range(max(verdicts) + 2):
        code = verdicts.get(number, _REFUSE)
        if not found or found[-1][1] != code:
            found.append((number, code))
    return found


def _choose(ranges: list[tuple[int, Code]]) -> Code:
    """A search by halves: a handful of comparisons for every call."""
    if len(ranges) == 1:
        return ranges[0][1]
    middle = len(ranges) // 2
    below, above = _choose(ranges[:middle]), _choose(ranges[middle:])
    if len(below) > 255:
        raise ValueError("the filter is too long for its jumps")
    return [(_AT_LEAST, len(below), 0, ranges[middle][0]), *below, *above]
