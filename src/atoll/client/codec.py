"""JSON and base64 without the cost of importing them.

`json` pulls in `re` and `enum`: 8 ms on a 13 ms interpreter start, for parsing that its C core does alone. The core
(`_json`) is used directly where this interpreter has it in the known shape; anything else falls back to `json`.
"""

from __future__ import annotations

import binascii

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from _typeshed import ReadableBuffer


class _Settings:
    """Settings of the C scanner; the same values as json.JSONDecoder's defaults."""

    strict = True
    object_hook = None
    object_pairs_hook = None
    parse_float = float
    parse_int = int
    parse_constant = float
    memo: dict[str, str] = {}


def loads(text: str | bytes | bytearray) -> Any:
    """Parse one JSON document; ValueError when it is none."""
    if not isinstance(text, str):
        text = bytes(text).decode("utf-8", "replace")
    text = text.strip(" \t\r\n")
    if not text:
        raise ValueError("empty JSON document")
    try:
        value, end = _scan(text, 0)
    except StopIteration as stop:
        raise ValueError(f"not JSON at character {stop.value}") from None
    except SystemError:  # how the bare C scanner of 3.11 reports a syntax error while json.decoder is not loaded
        raise ValueError("not JSON") from None
    if end != len(text):
        raise ValueError(f"not JSON at character {end}")
    return value


def dumps(value: Any) -> str:
    """One compact line in pure ASCII: safe to print on a terminal whatever the strings hold."""
    return "".join(_encode(value))


def unbase64(text: str) -> bytes:
    return binascii.a2b_base64(text)


def to_base64(data: ReadableBuffer) -> str:
    return binascii.b2a_base64(data, newline=False).decode("ascii")


def _refuse(value: Any) -> Any:
    raise TypeError(f"{type(value).__name__} cannot be sent as JSON")


try:
    from _json import encode_basestring_ascii, make_encoder, make_scanner

    _scan: Any = make_scanner(_Settings)  # type: ignore[arg-type]
    _c_encode: Any = make_encoder(None, _refuse, encode_basestring_ascii, None, ":", ",", False, False, False)

    def _encode(value: Any) -> Any:
        return _c_encode(value, 0)

    if _scan('{"a":[1,"b"]}', 0) != ({"a": [1, "b"]}, 13) or "".join(_encode({"a": [1, "é"]})) != '{"a":[1,"\\u00e9"]}':
        raise ImportError("another _json")
except (ImportError, TypeError, AttributeError):
    import json

    _scan = json.JSONDecoder().raw_decode

    def _encode(value: Any) -> Any:
        return json.dumps(value, separators=(",", ":"), default=_refuse, allow_nan=False)
