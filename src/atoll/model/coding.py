"""From bytes and plain values to requests, and from answers to bytes."""

import base64
import re
from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec
from msgspec import UNSET, UnsetType

from atoll import errors

T = TypeVar("T")
encode = msgspec.json.Encoder().encode
_BOUND = re.compile(r"Expected `(?P<kind>int|float)` (?P<sign>[<>]=?) (?P<value>\S+) - at `\$\.(?P<field>[^`]+)`")
_WORDS = {">=": "of at least", ">": "above", "<=": "of at most", "<": "below"}


def decode(kind: type[T], body: bytes | bytearray | memoryview) -> T:
    """A request from JSON, or InvalidArgument saying which field is wrong."""
    try:
        return msgspec.json.decode(body or b"{}", type=kind)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:  # UnicodeDecodeError is a ValueError
        raise errors.InvalidArgument(_reason(kind, str(error))) from None


def convert(kind: type[T], fields: Mapping[str, object]) -> T:
    """A request from plain values (other surfaces, stored specs)."""
    try:
        return msgspec.convert(fields, type=kind)
    except (msgspec.ValidationError, ValueError) as error:
        raise errors.InvalidArgument(_reason(kind, str(error))) from None


def _reason(kind: type[Any], text: str) -> str:
    """The decoder's words, the field first; for an unknown field with the nearest one there is."""
    found = re.search(r"unknown field `([^`]*)`", text)
    if found is None:
        bound = _BOUND.fullmatch(text)
        if bound is None:
            return text[:500]
        number = "whole number" if bound["kind"] == "int" else "number"
        return f"{bound['field']} must be a {number} {_WORDS[bound['sign']]} {bound['value'].removesuffix('.0')}"
    import difflib

    near = difflib.get_close_matches(found[1], [f.name for f in msgspec.structs.fields(kind)], 1)
    return text[:300] + (f"; did you mean `{near[0]}`?" if near else "")


def shown(data: bytes) -> tuple[str, str | UnsetType]:
    """Bytes as text, and as base64 only when the text has lost something."""
    try:
        return data.decode(), UNSET
    except UnicodeDecodeError:
        return data.decode("utf-8", "replace"), base64.b64encode(data).decode()
