"""Sandboxes, files and events as people read them at a terminal."""

from __future__ import annotations

from ..words import k8e as words
from .output import write
from .tables import age, clock, record, span, table

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any, TypeAlias

    Row: TypeAlias = Mapping[str, Any]  # what was to be printed as JSON

_BARE = ("seq", "kind", "at", "sandbox_id", "time")


def show_sessions(found: Sequence[Row]) -> None:
    rows = [
        (
            s["session_id"],
            s.get("name"),
            s["phase"],
            s["runtime_class"],
            s.get("image"),
            age(s.get("created_at")),
            _left(s),
        )
        for s in found
    ]
    table(
        ("ID", "NAME", "PHASE", "RUNTIME", "IMAGE", "AGE", "ENDS IN"),
        rows,
        "no sandboxes; make one: atoll sandbox create",
    )


def show_session(found: Row) -> None:
    hosts = found.get("allowed_hosts")
    moments = {
        "created_at": clock(found["created_at"]) if found.get("created_at") else None,
        "expires_at": clock(found["expires_at"]) if found.get("expires_at") else "never",
        "last_active": clock(found["last_active"]) if found.get("last_active") else None,
        "allowed_hosts": "none" if hosts == [] else hosts,
    }
    record([(name, moments.get(name, value)) for name, value in found.items()])


def show_files(found: Sequence[Row]) -> None:
    rows = [(f["path"], f["type"], f["size"], clock(f["modified"])) for f in found]
    table(("PATH", "TYPE", "SIZE", "CHANGED"), rows, "no files")


def show_events(found: Sequence[Row]) -> None:
    rows = []
    for event in found:
        instant = event.get("at") or event.get("time")
        when = clock(instant) if isinstance(instant, (int, float)) else instant
        more = {key: value for key, value in event.items() if key not in _BARE and value not in (None, "")}
        rows.append(
            (when, words.session_id(event["sandbox_id"]) if event.get("sandbox_id") else None, event.get("kind"), more)
        )
    table(("TIME", "SANDBOX", "EVENT", "DETAILS"), rows, "no events")


def show_value(value: Any) -> None:
    """Show any answer: its fields a line each, and each list of things as a table."""
    if not isinstance(value, dict):
        value = {"": value}
    tables = {key: item for key, item in value.items() if isinstance(item, list) and item and isinstance(item[0], dict)}
    fields = [(key, item) for key, item in value.items() if key not in tables and (key != "ok" or len(value) == 1)]
    if any(item not in (None, "", [], {}) for _, item in fields):
        record(
            [(key, clock(item) if key.endswith("_at") and isinstance(item, float) else item) for key, item in fields]
        )
    elif not tables:
        write(1, b"nothing\n")
    for rows in tables.values():
        columns = list(dict.fromkeys(key for row in rows for key in row))
        table([column.upper() for column in columns], [[row.get(column) for column in columns] for row in rows], "")


def _left(session: Row) -> str:
    import time

    return span(session["expires_at"] - time.time()) if session.get("expires_at") else "never"
