"""The filter of system calls as a program for the kernel: for a sandbox whose agent installs it itself, and for the direct engine.

gVisor builds the filter of an OCI configuration anew at each start, which takes longer than all of the agent's own start, and makes
EPERM of every error such a filter names. Its kernel takes a ready program as any Linux does. The agent installs this one before it
listens to anybody, so everything that ever runs in the sandbox is under it.

The `seccompiler` crate cannot express these programs: its filter has two actions, one for a match and one for all else, where these
answer EPERM, ENOSYS and others side by side; it compares one number at a time, where these search ranges; and it kills a process that
calls by another architecture, where `program` answers EPERM.
"""

import errno
import struct
from collections.abc import Iterable
from functools import cache

from atoll.backends.local.kernel import seccomp
from atoll.backends.local.kernel.syscalls import AUDIT_ARCHITECTURES, machine_name, numbers
from atoll.errors import Unsupported

_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _ERRNO = 0x7FFF_0000, 0x0005_0000
_NUMBER_AT, _ARCH_AT, _ARGUMENT_AT = 0, 4, 16  # in the kernel's struct seccomp_data
_KILL = 0
_X32 = 0x4000_0000  # where the numbers of another way to call begin, on x86_64
_NEW_LISTENER = 8  # of the flags of seccomp(2)
_NONE = 0xFFFF_FFFF  # no call at all, as a tracer sets it

Step = tuple[int, int, int, int]
Code = list[Step]


def _end(error: int = 0) -> Code:
    return [(_RETURN, 0, 0, _ERRNO | error if error else _ALLOW)]


_REFUSE = _end(errno.EPERM)
_KILLED: Code = [(_RETURN, 0, 0, _KILL)]


@cache
def program(name: str = "default", *, set_id: bool = True) -> bytes:
    """An array of `struct sock_filter`, in the order of bytes of the machine itself."""
    return _whole(_ranges(_verdicts(name) | ({} if set_id else _no_set_id())))


@cache
def no_set_id() -> bytes:
    """A program that refuses only that: for a sandbox whose engine has installed the rest."""
    return _whole(_ranges(_no_set_id(), _end()))


@cache
def no_listener() -> bytes:
    """A program for an engine's own calls: as on a kernel that hands no system calls to another process (EINVAL)."""
    asked = [(_LOAD, 0, 0, _ARGUMENT_AT + 8), (_ANY_BIT, 0, 1, _NEW_LISTENER), *_end(errno.EINVAL), *_end()]
    return _whole(_ranges({numbers()["seccomp"]: asked}, _end()))


def allowing(calls: Iterable[str], families: tuple[int, ...]) -> bytes:
    """A program for an engine's own calls: these, and no others; sockets of these families, and no new namespaces."""
    known = numbers()
    found = {known[call]: _end() for call in calls if call in known}
    found[known["clone"]] = [(_LOAD, 0, 0, _ARGUMENT_AT), (_ANY_BIT, 0, 1, seccomp.NAMESPACE_FLAGS), *_REFUSE, *_end()]
    found[known["clone3"]] = _end(errno.ENOSYS)  # its flags cannot be seen: a libc falls back
    found[known["socket"]] = found[known["socketpair"]] = _one_of(families)
    return _whole(_ranges(found))


def _whole(ranges: list[tuple[int, Code]]) -> bytes:
    steps: Code = [
        (_LOAD, 0, 0, _ARCH_AT),
        (_EQUAL, 1, 0, AUDIT_ARCHITECTURES[machine_name()]),
        *_REFUSE,
        (_LOAD, 0, 0, _NUMBER_AT),
        *_choose(ranges),
    ]
    return b"".join(struct.pack("=HBBI", *step) for step in steps)


def _no_set_id() -> dict[int, Code]:
    known = numbers()
    found = {known[call]: _clear((at, seccomp.SET_ID)) for call, at in seccomp.MODE_OF.items() if call in known}
    for call, (flags, mode) in seccomp.FLAGS_AND_MODE_OF.items():
        if call in known:
            found[known[call]] = _clear((flags, seccomp.CREATING), (mode, seccomp.SET_ID))
    return {**found, known["openat2"]: _end(errno.ENOSYS)}


def _clear(*ways: tuple[int, int]) -> Code:
    """Allowed when, of one of these arguments, none of these bits is set. The kernel, too, looks at the low half alone."""
    steps: Code = []
    for left, (index, bits) in zip(range(len(ways) - 1, -1, -1), ways, strict=True):
        steps += [(_LOAD, 0, 0, _ARGUMENT_AT + 8 * index), (_ANY_BIT, 0, 2 * left + 1, bits)]
    return [*steps, *_REFUSE, *_end()]


@cache
def of_profile(name: str) -> bytes:
    """The profile of an OCI configuration, as an engine with libseccomp makes a program of it: calls by the rules of another
    architecture kill, and those that are newer than the newest one it names do not exist (ENOSYS), so that a libc falls back."""
    profile = seccomp.profile(name)
    default = _end(_error(profile["defaultAction"], profile["defaultErrnoRet"]))
    verdicts = _rules(profile["syscalls"])
    tail = [(max(verdicts) + 1, _end(errno.ENOSYS)), (_X32, _KILLED), (_NONE, default)]
    steps: Code = [
        (_LOAD, 0, 0, _ARCH_AT),
        (_EQUAL, 1, 0, AUDIT_ARCHITECTURES[machine_name()]),
        *_KILLED,
        (_LOAD, 0, 0, _NUMBER_AT),
        *_choose([*_ranges(verdicts, default)[:-1], *tail]),
    ]
    return b"".join(struct.pack("=HBBI", *step) for step in steps)


def _rules(rules: Iterable[seccomp.Rule]) -> dict[int, Code]:
    """By number. Only what our profiles have is understood; anything else is an error, never a rule left out."""
    known, plain, judged = numbers(), {}, dict[str, list[seccomp.Argument]]()
    for rule in rules:
        if unknown := rule.keys() - {"names", "action", "args", "errnoRet"}:
            raise Unsupported(f"a rule with {', '.join(sorted(unknown))}")
        for call in rule["names"]:
            if "args" in rule:
                judged.setdefault(call, []).extend(rule["args"])
                _require(rule["action"] == "SCMP_ACT_ALLOW" and len(rule["args"]) == 1, call)
            elif call in known:
                _require(known[call] not in plain, call)
                plain[known[call]] = _end(_error(rule["action"], rule.get("errnoRet", errno.EPERM)))
    for call, arguments in judged.items():
        _require(known[call] not in plain, call)
        plain[known[call]] = _judge(call, arguments)
    return plain


def _judge(call: str, arguments: list[seccomp.Argument]) -> Code:
    """One of some values, or none of some bits, of the first argument."""
    _require(all(argument["index"] == 0 for argument in arguments), call)
    if all(argument["op"] == "SCMP_CMP_EQ" for argument in arguments):
        return _one_of(tuple(argument["value"] for argument in arguments))
    (argument,) = arguments
    _require(argument["op"] == "SCMP_CMP_MASKED_EQ" and argument["valueTwo"] == 0, call)
    return [(_LOAD, 0, 0, _ARGUMENT_AT), (_ANY_BIT, 0, 1, argument["value"]), *_REFUSE, *_end()]


def _error(action: str, error: int) -> int:
    _require(action in ("SCMP_ACT_ALLOW", "SCMP_ACT_ERRNO"), action)
    return error if action == "SCMP_ACT_ERRNO" else 0


def _require(met: bool, what: str) -> None:
    if not met:
        raise Unsupported(f"the filter of system calls says something about {what} that cannot be compiled here")


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


def _ranges(verdicts: dict[int, Code], default: Code = _REFUSE) -> list[tuple[int, Code]]:
    """(first number, what to do) for every stretch of numbers with the same answer."""
    found: list[tuple[int, Code]] = []
    for number in range(max(verdicts) + 2):
        code = verdicts.get(number, default)
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
