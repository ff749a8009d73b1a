"""Changing TOML settings: one table is added or replaced; every other line stays as it is."""

from __future__ import annotations

from typing import Any

from .jsonc import BadSettings


def put(text: str, section: str, name: str, values: dict[str, Any]) -> str:
    """Return the text with the table `[section.name]` holding these values, at its end if it is new."""
    import tomlkit
    from tomlkit.items import InlineTable

    document, table = _parse(text, section)
    if table is not None and table.get(name) == values:
        return text
    if isinstance(table, InlineTable):
        table[name] = tomlkit.inline_table()
        table[name].update(values)
        return tomlkit.dumps(document)
    kept = take_out(text, section, name)
    space = "" if not kept else "\n" if kept.endswith("\n") else "\n\n"
    made = tomlkit.document()
    made[section] = tomlkit.table(is_super_table=True)
    made[section][name] = values
    return kept + space + tomlkit.dumps(made)


def take_out(text: str, section: str, name: str) -> str:
    """Return the text without that table; the same text when there is none."""
    import tomlkit

    document, table = _parse(text, section)
    if table is None or name not in table:
        return text
    del table[name]
    if not table:
        del document[section]
    made = tomlkit.dumps(document).rstrip("\n")
    return made + "\n" if made.strip() else ""


def _parse(text: str, section: str) -> tuple[Any, Any]:
    """Return the document, and the table of that name or None."""
    import tomlkit
    from tomlkit.exceptions import TOMLKitError

    try:
        document = tomlkit.parse(text)
    except TOMLKitError as bad:
        raise BadSettings(f"not TOML: {bad}") from None
    table = document.get(section)
    if table is not None and not isinstance(table, dict):
        raise BadSettings(f"{section} is not a table")
    return document, table
