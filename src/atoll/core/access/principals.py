"""Principals: callers. A principal owns what it creates and sees nothing else."""

import os
import secrets
import socket
import struct
from dataclasses import dataclass

from atoll import errors

_ALPHABET = "abcdefghijklmnopqrstuvwxyz234567"


@dataclass(frozen=True, slots=True)
class Principal:
    """A caller: `owner` is what the store compares, `uid` the local user whose rights host paths are opened with."""

    owner: str
    uid: int
    gid: int
    kind: str = "local"


def local(uid: int, gid: int) -> Principal:
    return Principal(f"uid:{uid}", uid, gid)


def peer(sock: socket.socket, allowed: frozenset[int] | None = None) -> Principal:
    """The local principal at the other end of a Unix socket; users that may not use this daemon are refused."""
    raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    _, uid, gid = struct.unpack("3i", raw)
    if uid not in (allowed or frozenset((os.geteuid(),))):
        raise errors.PermissionDenied("this daemon serves another user", hint="use your own ATOLL_HOME")
    return local(uid, gid)


def peer_pid(sock: socket.socket) -> int:
    """The process that connected to a Unix socket."""
    raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return int(struct.unpack("3i", raw)[0])


def new_id(length: int = 20) -> str:
    """Five random bits for each character: 100 for a sandbox."""
    return "".join(_ALPHABET[byte & 31] for byte in secrets.token_bytes(length))


def new_command_id() -> str:
    return "c" + new_id(19)
