"""Entries that open a host for some requests only: `GET|HEAD http://mirror.example:8081/simple/`.

They exist for plain HTTP, where the broker reads every request. Such an entry opens no other port of the host, and on its port
nothing but requests with one of its methods, below its path, without an upgrade, without a body where the method has none,
and without headers that ask the server to take the request for another one.
"""

import re
from dataclasses import dataclass
from typing import Final

from atoll.errors import InvalidArgument

_ENTRY: Final = re.compile(r"([A-Z]+(?:\|[A-Z]+)*) http://([^/:]+)(?::([0-9]{1,5}))?(/[^ ]*)\Z")
_METHODS: Final = frozenset(("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"))
_NO_BODY: Final = frozenset(("GET", "HEAD", "DELETE", "OPTIONS"))
_PATH: Final = re.compile(r"(?:[A-Za-z0-9._~!$&'()*+,;=:@/-]|%[0-9A-Fa-f]{2})+\Z")
# Encoded dots, slashes, backslashes, percent signs and controls: where two parsers could see two paths.
_TWOFOLD: Final = re.compile(r"%(?:2[eEfF5]|5[cC]|[01][0-9A-Fa-f]|7[fF])|//|/\.{1,2}(?:/|\Z)|;")
OVERRIDES: Final = frozenset(
    (b"x-http-method-override", b"x-http-method", b"x-method-override", b"x-original-url", b"x-rewrite-url")
)
_HINT: Final = "for example: GET|HEAD http://mirror.example/simple/"


@dataclass(frozen=True, slots=True)
class Request:
    """The fields of a request that the broker reads."""

    method: str
    path: str  # without the query
    upgrade: bool = False
    body: bool = False
    overrides: bool = False


@dataclass(frozen=True, slots=True)
class Requests:
    """The requests that an entry allows."""

    methods: tuple[str, ...]
    path: str

    def permits(self, request: Request) -> bool:
        if request.method not in self.methods or request.upgrade or request.overrides:
            return False
        if request.body and request.method in _NO_BODY:
            return False
        below = self.path if self.path.endswith("/") else self.path + "/"
        return _is_plain(request.path) and (request.path == self.path or request.path.startswith(below))


def parse(entry: str) -> tuple[str, int, Requests]:
    """Name, port and requests of an entry; InvalidArgument else."""
    found = _ENTRY.match(entry)
    if found is None:
        raise InvalidArgument(f"{entry[:80]!r} is not a host and not METHODS http://NAME/PATH", hint=_HINT)
    methods, name, port, path = tuple(dict.fromkeys(found[1].split("|"))), found[2], int(found[3] or 80), found[4]
    if unknown := [method for method in methods if method not in _METHODS]:
        raise InvalidArgument(
            f"{unknown[0]} is not a method of a rule", hint=f"known are {', '.join(sorted(_METHODS))}"
        )
    if not 1 <= port <= 65535 or port == 443:
        raise InvalidArgument(f"{entry[:80]!r}: rules for requests need a port of plain HTTP", hint=_HINT)
    if not _is_plain(path):
        raise InvalidArgument(f"{path[:80]!r} is not a plain path", hint=_HINT)
    return name, port, Requests(methods, path)


def show(name: str, port: int, requests: Requests) -> str:
    where = name if port == 80 else f"{name}:{port}"
    return f"{'|'.join(requests.methods)} http://{where}{requests.path}"


def _is_plain(path: str) -> bool:
    return _PATH.match(path) is not None and _TWOFOLD.search(path) is None
