"""Fixes for requests that cannot be decoded: a patch that the caller merges into the request and sends again.

A fix changes only what was wrong, keeps what the caller meant, and is offered only when the merged
request decodes. Nothing that would destroy something is ever put into one.
"""

import base64
import difflib
import re
from collections.abc import Mapping
from typing import Any

import msgspec

from atoll.surfaces.iii import requests as r
from atoll.surfaces.iii.failure import Failure, Patch

NO_FIX = object()
SYNONYMS = {"py": "python", "python3": "python", "js": "node", "nodejs": "node", "javascript": "node",
            "typescript": "node", "ts": "node"}  # fmt: skip
TRUE, FALSE = ("true", "yes", "on", "1"), ("false", "no", "off", "0", "")


def nearest_image(name: str, allowed: list[str], lang: str = "") -> str | None:
    """Return the allowed name that is most like this one; a reference counts by its last part."""
    if not allowed:
        return None
    bare = re.split(r"[:@]", name.rpartition("/")[2])[0].lower()
    for word in (bare, lang.lower()):
        known: str = SYNONYMS.get(word, word)
        if known in allowed:
            return known
    return next(iter(difflib.get_close_matches(bare, allowed, 1, 0.5)), allowed[0])


def propose(kind: type[msgspec.Struct], payload: Any, allowed: list[str]) -> Patch | None:
    """Return a patch after which the payload decodes, or None when there is none."""
    given = payload if isinstance(payload, dict) else {}
    if payload is not None and payload != given:
        return None
    patch: dict[str, object] = {}
    for field in msgspec.structs.fields(kind):
        value = given.get(field.name, msgspec.UNSET)
        if value is msgspec.UNSET:
            if field.required:
                patch[field.name] = _missing(field.name, given, allowed)
        elif not _decodes(field.type, value) or (field.name == "env" and not _is_environment(value)):
            patch[field.name] = _mended(field, value)
        elif field.name == "stdin" and isinstance(value, str) and not _is_base64(value):
            patch[field.name] = base64.b64encode(value.encode("utf-8", "replace")).decode()
    if not patch or any(value is NO_FIX for value in patch.values()):
        return None
    try:
        r.decode(kind, {**given, **patch}, "")
    except Failure:
        return None
    return patch


def _missing(name: str, given: Mapping[str, object], allowed: list[str]) -> Any:
    image, lang = given.get("image"), given.get("lang")
    if name == "image" and allowed:
        return nearest_image("", allowed, lang if isinstance(lang, str) else "")
    if name == "lang":
        return "node" if image == "node" else "python"
    return NO_FIX


def _mended(field: Any, value: Any) -> Any:
    """Return the value as the field wants it, its default, or NO_FIX."""
    if field.name == "env":
        return _environment(value)
    usual = field.default
    if usual is msgspec.NODEFAULT and field.default_factory is not msgspec.NODEFAULT:
        usual = field.default_factory()
    negative = isinstance(value, int | float) and value < 0  # zero would be another wish than none
    if (value is None or negative) and usual is not msgspec.NODEFAULT:
        return usual
    for candidate in _candidates(value, str(field.type)):
        if _decodes(field.type, candidate):
            return candidate
    return NO_FIX


def _candidates(value: Any, wanted: str) -> list[Any]:
    """Return what may have been meant, the likeliest first."""
    found: list[Any] = []
    text = str(value).strip().lower() if isinstance(value, str | int | float) else ""
    if isinstance(value, str) and re.fullmatch(r"-?[0-9]+(\.[0-9]+)?", text):
        found.append(int(float(text)))
    if isinstance(value, float) and value == value and abs(value) < 2**62:
        found.append(int(value))
    bounds = sorted(int(bound) for bound in re.findall(r"[gl]e=([0-9]+)", wanted))
    for number in (value, *found):
        if isinstance(number, int) and not isinstance(number, bool) and bounds:
            found.append(bounds[0] if number < bounds[0] else bounds[-1])
            break
    if text in TRUE or text in FALSE:
        found.append(text in TRUE)
    if isinstance(value, list):
        found.append([one if isinstance(one, str) else str(one) for one in value])
    elif isinstance(value, str):
        found.append([value])
    elif isinstance(value, int | float):
        found.append(str(value))
    return found


def _environment(value: Any) -> Any:
    """Return the entries that are good or can be made so."""
    if isinstance(value, str):
        value = [value]
    if isinstance(value, list):
        kept = [entry for entry in value if _is_environment([entry])]
        return kept
    if isinstance(value, dict):
        texts = {str(key): one if isinstance(one, str) else _text(one) for key, one in value.items()}
        return {key: text for key, text in texts.items() if text is not None and _is_environment({key: text})}
    return []


def _text(value: Any) -> str | None:
    if isinstance(value, bool):
        return "true" if value else "false"
    return str(value) if isinstance(value, int | float) else None


def _decodes(kind: Any, value: Any) -> bool:
    try:
        msgspec.convert(value, type=kind)
    except (msgspec.ValidationError, ValueError, RecursionError):
        return False
    return True


def _is_environment(value: Any) -> bool:
    try:
        r.environment(value)
    except Failure:
        return False
    return True


def _is_base64(text: str) -> bool:
    try:
        r.base64_bytes("", text)
    except Failure:
        return False
    return True
