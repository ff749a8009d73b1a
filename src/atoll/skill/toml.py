"""Changing TOML settings: one table is added at the end or replaced where it stands; every other line stays as it is."""

from __future__ import annotations

import json
import re
import tomllib
from typing import Any

from .jsonc import BadSettings

_HEADER = re.compile(r"^\s*\[", re.MULTILINE)


def read(text: str) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as bad:
        raise BadSettings(f"not TOML: {bad}") from None


def put(text: str, section: str, name: str, values: dict[str, Any]) -> str:
    """The text with the table `[section.name]` holding these values."""
    data = read(text)
    table = data.get(section, {})
    if not isinstance(table, dict):
        raise BadSettings(f"{section} is not a table")
    if table.get(name) == values:
        return text
    kept = take_out(text, section, name)
    lines = [f"[{section}.{_key(name)}]", *(f"{_key(key)} = {_shown(value)}" for key, value in values.items())]
    space = "" if not kept else "\n" if kept.endswith("\n") else "\n\n"
    made = kept + space + "\n".join(lines) + "\n"
    return _checked(made, {**data, section: {**table, name: values}})


def take_out(text: str, section: str, name: str) -> str:
    """The text without that table; the same text when there is none."""
    data = read(text)
    table = data.get(section)
    if not isinstance(table, dict) or name not in table:
        return text
    found = re.search(
        rf"^[ \t]*\[[ \t]*{section}[ \t]*\.[ \t]*(?:{re.escape(name)}|\"{re.escape(name)}\")[ \t]*\][^\n]*\n?",
        text,
        re.M,
    )
    if found is None:
        raise BadSettings(f"{section}.{name} is written in a form this program cannot change; please edit it by hand")
    following = _HEADER.search(text, found.end())
    end = following.start() if following else len(text)
    made = (
        text[: found.start()].rstrip("\n")
        + ("\n\n" if text[: found.start()].strip() and following else "\n")
        + text[end:]
    )
    if not made.strip():
        made = ""
    rest = {key: value for key, value in table.items() if key != name}
    meant = {**data, section: rest} if rest else {key: value for key, value in data.items() if key != section}
    return _checked(made, meant)


def _key(text: str) -> str:
    return text if re.fullmatch(r"[A-Za-z0-9_-]+", text) else json.dumps(text)


def _shown(value: Any) -> str:
    if isinstance(value, list):
        return "[" + ", ".join(_shown(item) for item in value) + "]"
    return json.dumps(value)


def _checked(text: str, meant: dict[str, Any]) -> str:
    found = read(text)
    if {k: v for k, v in found.items() if v != {}} != {k: v for k, v in meant.items() if v != {}}:
        raise BadSettings("its form is one this program cannot change safely; please edit it by hand")
    return text
