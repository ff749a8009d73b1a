"""From a kernel's message to the fields of a result line."""

import json
from typing import Any

FIELDS = {
    "text/plain": "text", "text/html": "html", "text/markdown": "markdown", "image/svg+xml": "svg", "image/png": "png",
    "image/jpeg": "jpeg", "application/pdf": "pdf", "text/latex": "latex", "application/json": "json",
    "application/javascript": "javascript", "application/vnd.atoll.data+json": "data",
    "application/vnd.atoll.chart+json": "chart",
}  # fmt: skip
WRAPPED = ("image/png", "image/jpeg", "application/pdf")  # base64, which some write in lines


def result_line(content: dict[str, Any], *, is_main: bool) -> dict[str, Any]:
    """Return the line of a displayed or returned value."""
    line: dict[str, Any] = {"type": "result", "is_main_result": is_main}
    extra = {}
    for mime, value in (content.get("data") or {}).items():
        if isinstance(value, list) and all(isinstance(part, str) for part in value):
            value = "".join(value)
        if mime in WRAPPED and isinstance(value, str):
            value = "".join(value.split())
        if mime == "text/plain" and isinstance(value, str):
            value = unquoted(value)
        if mime in FIELDS:
            line[FIELDS[mime]] = value
        else:
            extra[str(mime)] = value
    if extra:
        line["extra"] = extra
    return line


def unquoted(text: str) -> str:
    """Return a string's own text, without the quotes around it."""
    return text[1:-1] if len(text) > 1 and text[0] == text[-1] and text[0] in "'\"" else text


def encode(line: dict[str, Any]) -> bytes:
    """Return the line as it is sent: one JSON object, then a newline."""
    return json.dumps(line, ensure_ascii=False, default=str).encode("utf-8", "replace") + b"\n"
