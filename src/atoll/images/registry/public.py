"""Pulls for callers with a key: no login of the operator's, public registries over TLS only, and a bound in bytes."""

import json
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import urllib3
from urllib3.connection import HTTPSConnection
from urllib3.connectionpool import HTTPSConnectionPool

from atoll.egress.addresses import refusal
from atoll.errors import Exhausted, PermissionDenied
from atoll.images.layers.tree import write_atomically
from atoll.images.registry.credentials import DockerConfig

ANONYMOUS = DockerConfig(())


@dataclass(frozen=True, slots=True)
class Guest:
    """A caller who has only a key. `anywhere`: the operator named the image, so its registry may be of any kind."""

    owner: str
    most_bytes: int
    anywhere: bool = False


class PublicConnection(HTTPSConnection):
    """Connects to public addresses only. The address that was judged is the one that is dialled."""

    def _new_conn(self) -> socket.socket:
        return urllib3.util.connection.create_connection(
            (public_address(self._dns_host, self.port), self.port),
            self.timeout,
            source_address=self.source_address,
            socket_options=self.socket_options,
        )


class _PublicPool(HTTPSConnectionPool):
    ConnectionCls = PublicConnection


def public_only(manager: urllib3.PoolManager) -> None:
    """From now on this manager makes TLS connections to public addresses, and no other."""
    manager.pool_classes_by_scheme = {"https": _PublicPool}


def public_address(host: str, port: int | None) -> str:
    """An address of a host; PermissionDenied when one of its addresses is not public."""
    try:
        found = [str(entry[4][0]) for entry in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)]
    except (OSError, UnicodeError) as error:
        raise urllib3.exceptions.HTTPError(f"the name {host[:253]} cannot be resolved: {error}") from None
    if not found or any(refusal(address) for address in found):
        raise PermissionDenied(
            f"{host[:253]} is no public registry",
            hint="an operator can pull the image, or list it under [images] allow",
        )
    return found[0]


class Quota:
    """The bytes that images pulled for keys take, by owner, in a file beside the images."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._pulling: set[str] = set()

    def begin(self, guest: Guest, exists: Callable[[str], bool]) -> int:
        """The bytes that are left for a pull, which the caller ends with `end`. Exhausted when there are none."""
        with self._lock:
            if guest.owner in self._pulling:
                raise Exhausted("another pull of this key is running", hint="wait for it")
            known = self._read()
            mine = {digest: size for digest, size in known.get(guest.owner, {}).items() if exists(digest)}
            left = guest.most_bytes - sum(mine.values())
            if left <= 0:
                raise Exhausted(
                    f"the images this key has pulled take {guest.most_bytes} bytes, which is the most",
                    hint="an operator can remove one with `atoll image rm`, or raise [images] key_pull_mb",
                )
            self._pulling.add(guest.owner)
            return left

    def end(self, guest: Guest, digest: str | None, size: int) -> None:
        """The pull is over; `digest` is the image that came, if one did."""
        with self._lock:
            self._pulling.discard(guest.owner)
            if digest is not None:
                known = self._read()
                known.setdefault(guest.owner, {})[digest] = size
                write_atomically(self._path, json.dumps(known).encode())

    def _read(self) -> dict[str, dict[str, int]]:
        try:
            found: dict[str, dict[str, int]] = json.loads(self._path.read_bytes())
        except FileNotFoundError:
            return {}
        return found
