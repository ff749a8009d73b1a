"""Text and its exact bytes side by side: proto strings must be UTF-8, what a sandbox says need not be."""

from __future__ import annotations

import base64
import codecs

from msgspec import UnsetType

# Both forms together must leave room in a 64 MiB message, with another stream beside them.
_BOTH_BELOW = 12 * 1024 * 1024


def both(text: str, encoded: str | UnsetType) -> tuple[str, bytes]:
    """The string and the bytes of one output. Large ones are sent in one form only: bytes when text would lose something."""
    if isinstance(encoded, str):
        exact = base64.b64decode(encoded)
        return ("" if len(exact) > _BOTH_BELOW else text), exact
    exact = text.encode("utf-8", "surrogateescape")
    return clean(text), (b"" if len(exact) > _BOTH_BELOW else exact)


def both_of(data: bytes) -> tuple[str, bytes]:
    try:
        return data.decode(), (b"" if len(data) > _BOTH_BELOW else data)
    except UnicodeDecodeError:
        return ("" if len(data) > _BOTH_BELOW else data.decode("utf-8", "replace")), data


def clean(text: object) -> str:
    """A string a proto field takes: whatever the guest put into a name is shown, never an error."""
    return str(text).encode("utf-8", "replace").decode()


class Pieces:
    """Turns pieces of one byte stream into pieces of text; a character that is cut in two comes whole with its second half."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, data: bytes, *, last: bool = False) -> str:
        return self._decoder.decode(data, last)
