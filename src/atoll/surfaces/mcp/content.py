"""Answers of tools: text, structured values, images and other binary files, and long output cut in the middle."""

import base64
import json
from collections.abc import Mapping
from typing import NotRequired, TypedDict

import msgspec

from atoll.model import ExecResult

KEPT = 16_000  # bytes of a text; more is cut in its middle


class Result(TypedDict):
    """The result of a tool."""

    content: list[Mapping[str, object]]
    isError: bool
    structuredContent: NotRequired[Mapping[str, object]]


_IMAGES = (
    (b"\x89PNG\r\n\x1a\n", "image/png"),
    (b"\xff\xd8\xff", "image/jpeg"),
    (b"GIF87a", "image/gif"),
    (b"GIF89a", "image/gif"),
)


def text(value: str, *, is_error: bool = False, structured: Mapping[str, object] | None = None) -> Result:
    found: Result = {"content": [{"type": "text", "text": clean(value)}], "isError": is_error}
    if structured is not None:
        found["structuredContent"] = structured
    return found


def values(fields: Mapping[str, object], *, is_error: bool = False) -> Result:
    """K8E's form: the text is the JSON of the structured content."""
    fields = {key: clean(value) if isinstance(value, str) else value for key, value in fields.items()}
    return text(json.dumps(fields, ensure_ascii=False), is_error=is_error, structured=fields)


def failed(message: str) -> Result:
    return text(f"Error: {message}", is_error=True)


def clean(value: str) -> str:
    """Without lone surrogates, which JSON cannot carry."""
    return value.encode("utf-8", "replace").decode()


def cut(value: str, most: int = KEPT) -> str:
    """The first and the last half of what may stay, with the size of what was left out between them."""
    raw = value.encode("utf-8", "replace")
    if len(raw) <= most:
        return raw.decode()
    return join_halves(raw[: most // 2], len(raw) - most, raw[-(most // 2) :])


def join_halves(head: bytes, omitted: int, tail: bytes) -> str:
    """Around a gap of `omitted` bytes, cut on whole characters."""
    first, last = whole_end(head), whole_start(tail)
    omitted += len(head) - len(first) + len(tail) - len(last)
    shown = first.decode("utf-8", "replace"), last.decode("utf-8", "replace")
    return f"{shown[0]}\n... [{omitted} bytes omitted] ...\n{shown[1]}"


def whole_end(raw: bytes) -> bytes:
    """Without the beginning of a character at the end."""
    for back in range(1, min(4, len(raw) + 1)):
        byte = raw[-back]
        if byte & 0xC0 == 0x80:
            continue
        needs = 4 if byte >= 0xF0 else 3 if byte >= 0xE0 else 2 if byte >= 0xC0 else 1
        return raw[:-back] if needs > back else raw
    return raw


def whole_start(raw: bytes) -> bytes:
    """Without the rest of a character at the start."""
    start = 0
    while start < min(3, len(raw)) and raw[start] & 0xC0 == 0x80:
        start += 1
    return raw[start:]


def image_type(raw: bytes) -> str | None:
    if raw[:4] == b"RIFF" and raw[8:12] == b"WEBP":
        return "image/webp"
    return next((kind for magic, kind in _IMAGES if raw.startswith(magic)), None)


def binary(path: str, raw: bytes) -> Mapping[str, object]:
    """A file that is no text: an image as one, anything else as a resource with its bytes."""
    data, kind = base64.b64encode(raw).decode(), image_type(raw)
    if kind is not None:
        return {"type": "image", "data": data, "mimeType": kind}
    from urllib.parse import quote

    uri = "file://" + quote(path.encode("utf-8", "surrogateescape"))
    return {"type": "resource", "resource": {"uri": uri, "mimeType": "application/octet-stream", "blob": data}}


class Gathered:
    """A stream of output, of which the beginning and the end are kept."""

    def __init__(self) -> None:
        self.total = 0
        self._head = bytearray()
        self._tail = bytearray()

    def add(self, data: bytes) -> None:
        self.total += len(data)
        self._head += data[: KEPT - len(self._head)]
        self._tail += data[-KEPT:]
        del self._tail[: -KEPT // 2]

    @property
    def is_cut(self) -> bool:
        return self.total > KEPT

    def text(self) -> str:
        if not self.is_cut:
            return self._head.decode("utf-8", "replace")
        return join_halves(bytes(self._head[: KEPT // 2]), self.total - KEPT, bytes(self._tail))


class Ended:
    """A command's end with its output: both streams, and all of it in the order it came."""

    def __init__(self) -> None:
        self.stdout, self.stderr, self.output = Gathered(), Gathered(), Gathered()
        self.done: ExecResult | None = None

    @property
    def exit_code(self) -> int | None:
        assert self.done is not None
        return 124 if self.done.timed_out else self.done.exit_code

    def fields(self) -> Mapping[str, object]:
        assert self.done is not None
        return {
            "stdout": self.stdout.text(),
            "stderr": self.stderr.text(),
            "exit_code": self.exit_code,
            "duration_ms": self.done.duration_ms,
            "timed_out": self.done.timed_out,
            "oom_killed": self.done.oom,
            "truncated": self.stdout.is_cut or self.stderr.is_cut,
            "stdout_bytes": self.stdout.total,
            "stderr_bytes": self.stderr.total,
            **({"blocked": msgspec.to_builtins(self.done.blocked)} if self.done.blocked else {}),
        }
