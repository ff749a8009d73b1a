"""Giving up rights: after this the broker is a process that can open sockets and nothing else of note."""

import ctypes
import os
import resource
from typing import Final

_PR_SET_DUMPABLE: Final = 4
_PR_CAPBSET_DROP: Final = 24
_PR_SET_NO_NEW_PRIVS: Final = 38
_PR_CAP_AMBIENT: Final = 47
_CAPABILITY_VERSION_3: Final = 0x20080522
_libc = ctypes.CDLL(None, use_errno=True)


def raise_file_limit() -> int:
    """Allow as many open files as the hard limit does; the number."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 1 << 20 if hard == resource.RLIM_INFINITY else hard
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return wanted


def drop_rights(uid: int | None, gid: int | None) -> None:
    """Become `uid` (when given), without groups, capabilities or a way to gain any; OSError if that fails."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for capability in range(64):
        _libc.prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0)  # fails without CAP_SETPCAP, and past the last one
    if uid is not None:
        os.setgroups([])
        group = uid if gid is None else gid
        os.setresgid(group, group, group)
        os.setresuid(uid, uid, uid)
    _libc.prctl(_PR_CAP_AMBIENT, 4, 0, 0, 0)
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION_3, 0)
    _check(_libc.capset(header, (ctypes.c_uint32 * 6)()), "capset")
    _check(_libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "no_new_privs")
    _check(_libc.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0), "dumpable")


def _check(result: int, what: str) -> None:
    if result != 0:
        err = ctypes.get_errno()
        raise OSError(err, f"{what}: {os.strerror(err)}")
