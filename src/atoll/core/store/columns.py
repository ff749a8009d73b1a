"""Rows of the store whose columns hold JSON: how a value is written, and what is read back."""

import json
from collections.abc import Mapping
from typing import Any

import msgspec

Row = dict[str, Any]

JSON = ("spec", "record", "exit", "data", "argv", "sessions")


def packed(value: Any) -> str:
    try:
        return msgspec.json.encode(value).decode()
    except UnicodeEncodeError:  # half a surrogate pair, which only the slower way can write
        return json.dumps(value)


def unpacked(text: str | bytes) -> Any:
    try:
        return msgspec.json.decode(text)
    except msgspec.DecodeError:  # written the slower way
        return json.loads(text)


def decoded(row: Mapping[str, Any]) -> Row:
    """A dict, with the JSON in it decoded."""
    found = dict(row)
    for key in JSON:
        if isinstance(found.get(key), str):
            found[key] = unpacked(found[key])
    return found


class _Shown(msgspec.Struct):
    limits: msgspec.Raw = msgspec.Raw(b"{}")
    policy: msgspec.Raw = msgspec.Raw(b"{}")


_parts = msgspec.json.Decoder(_Shown).decode


def shown(record: str, seen: dict[bytes, Any]) -> Row:
    """The parts of a sandbox's record that a caller is shown.

    A thousand sandboxes have a few policies and limits among them: each is decoded once, and kept in `seen`.
    """
    try:
        parts = _parts(record)
    except msgspec.DecodeError:  # written the slower way
        return dict(json.loads(record))
    found = {}
    for key, raw in (("limits", bytes(parts.limits)), ("policy", bytes(parts.policy))):
        if raw not in seen:
            seen[raw] = unpacked(raw)
        found[key] = seen[raw]
    return found
