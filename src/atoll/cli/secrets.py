"""`atoll secret set|list|rm`. A value is never an argument: those are in process lists and shell histories."""

from __future__ import annotations

import os

from ..client import calls
from ..client.codec import dumps
from ..client.http import quote, with_query
from ..errors import InvalidArgument
from .output import print_json, tell
from .session import open_link

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .grammar import Arguments

MAX_VALUE = 64 << 10


def set_value(arguments: Arguments) -> int:
    name, key = arguments.rest
    fields = {"key": key, "value": _value(arguments)}
    headers = (("Content-Type", "application/json"),)
    open_link(arguments).call(calls.Call("PUT", _path(name), dumps(fields).encode("ascii"), headers, repeatable=True))
    tell(f"{name}:{key} is set")
    return 0


def list_names(arguments: Arguments) -> int:
    wire = open_link(arguments).call(calls.get("/v1/secrets"))
    if arguments.json:
        print_json(wire)
        return 0
    for name, keys in wire["secrets"].items():
        for key in keys:
            tell(f"{name}:{key}")
    return 0


def remove(arguments: Arguments) -> int:
    key = arguments.rest[1] if len(arguments.rest) > 1 else None
    open_link(arguments).call(calls.Call("DELETE", with_query(_path(arguments.rest[0]), {"key": key})))
    return 0


def _value(arguments: Arguments) -> str:
    if arguments.from_env:
        value = os.environ.get(arguments.from_env)
        if value is None:
            raise InvalidArgument(f"there is no variable {arguments.from_env}")
        return value
    if os.isatty(0):
        from getpass import getpass

        return getpass("value: ")
    data = b""
    while piece := os.read(0, 65536):
        data += piece
        if len(data) > MAX_VALUE:
            raise InvalidArgument(f"a secret has at most {MAX_VALUE} bytes")
    try:
        return data.decode().removesuffix("\n")
    except UnicodeDecodeError:
        raise InvalidArgument("a secret's value is UTF-8 text") from None


def _path(name: str) -> str:
    if not name or "/" in name or name in (".", ".."):
        raise InvalidArgument(f"{name!r:.80} is not a secret's name")
    return "/v1/secrets/" + quote(name)
