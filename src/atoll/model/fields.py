"""Types for the fields of requests: ranges, patterns, and the checks that need code."""

import base64
import re
from typing import Annotated, Any

from msgspec import Meta, Struct

DAY = 86400
KIB, MIB = 1024, 1024 * 1024

MAX_TIMEOUT_MS = DAY * 1000
MAX_CODE = 32 * MIB
MAX_STDIN = 32 * MIB  # bytes; as base64 they fit into a request
MAX_OUTPUT = 16 * MIB
MAX_ENV = 1024
MAX_ARGS = 64 * 1024

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,62}\Z")
ALIAS = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.:@+-]{0,199}\Z")
COMMAND_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}\Z")
USER = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,31}(:[A-Za-z0-9_][A-Za-z0-9_.-]{0,31})?\Z")

Runtime = Annotated[str, Meta(pattern=r"^[a-z][a-z0-9-]{0,31}$")]
Natural = Annotated[int, Meta(ge=0, le=2**53)]
Seconds = Annotated[float, Meta(gt=0, le=10 * 365 * DAY)]
Mode = Annotated[int, Meta(ge=0, le=0o7777)]
TimeoutMs = Annotated[int, Meta(ge=0, le=MAX_TIMEOUT_MS)]
Entries = Annotated[list[dict[str, Any]], Meta(max_length=1000)]  # of a manifest; checked where they are done
Rows = Annotated[int, Meta(ge=1, le=4096)]
Port = Annotated[int, Meta(ge=1, le=65535)]


class Request(Struct, forbid_unknown_fields=True, kw_only=True):
    """Base of all that is asked."""


class Answer(Struct, kw_only=True):
    """Base of all that is answered."""


def check_env(env: dict[str, str]) -> None:
    if len(env) > MAX_ENV:
        raise ValueError(f"more than {MAX_ENV} environment variables")
    for key, value in env.items():
        if not key or "=" in key or "\0" in key or "\0" in value or len(key) > 256:
            raise ValueError(f"environment variable {key!r:.80} is not valid: no `=` in names, no NUL, no empty name")
    if sum(map(len, env.values())) > 512 * KIB:
        raise ValueError("the environment is larger than 512 KiB")


def check_path(what: str, path: str) -> None:
    if not path:
        raise ValueError(f"{what} is empty")
    if "\0" in path:
        raise ValueError(f"{what} contains NUL")
    if len(path.encode("utf-8", "surrogateescape")) > 4096:
        raise ValueError(f"{what} is longer than 4096 bytes")


def unbase64(what: str, text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except ValueError:
        raise ValueError(f"{what} is not base64") from None
