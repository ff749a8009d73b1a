"""`atoll version --check`: whether this program, the daemon that serves, the agent and the store belong together."""

from __future__ import annotations

import os
import subprocess

from .. import __version__
from ..client import calls
from ..errors import AtollError
from .doctor_machine import check
from .output import print_json, say, tell
from .session import open_link

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ..client._sync.driver import Link
    from .doctor_machine import Check
    from .grammar import Arguments


def check_versions(arguments: Arguments) -> int:
    """Print a row for each part; 1 where one does not fit, with what to do. A daemon is started: one that is refused says why."""
    rows = [check("atoll", True, __version__)]
    try:
        link = open_link(arguments)
        rows += _served(link)
    except AtollError as refused:  # a store of a newer version is such a reason
        rows.append(check("daemon", False, refused.message, refused.hint or "atoll doctor"))
    ok = all(row["ok"] for row in rows)
    if arguments.json:
        print_json({"ok": ok, "version": __version__, "checks": rows})
        return 0 if ok else 1
    for row in rows:
        tell(f"{row['name'].ljust(8)} {row['detail']}")
        if row.get("fix"):
            say(f"{' ' * 8} fix: {row['fix']}")
    return 0 if ok else 1


def _served(link: Link) -> list[Check]:
    """Return the rows of the daemon and of what it works with."""
    version = str(link.call(calls.get("/v1/health")).get("version"))
    fix = "atoll daemon stop: the next command starts this version, and sandboxes go on"
    detail = version if version == __version__ else f"{version}, and this program is {__version__}"
    return [check("daemon", version == __version__, detail, fix), *_agent(), *_store(link.home)]


def _agent() -> list[Check]:
    """Return the version of the agent that new sandboxes get; nothing where this is the client alone."""
    program = os.path.join(os.path.dirname(__file__), "..", "_bin", "atoll-guest")
    if not os.path.exists(program):
        return []
    try:
        said = subprocess.run([program, "version"], capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.SubprocessError) as failure:
        return [check("agent", False, f"does not start: {failure}", "install atoll again: sh install.sh")]
    return [
        check(
            "agent", said.returncode == 0, said.stdout.strip() or "does not say", "install atoll again: sh install.sh"
        )
    ]


def _store(home: str) -> list[Check]:
    """Return the number of the store's form; a daemon that could not read it would not serve."""
    import sqlite3

    path = os.path.join(home, "atoll.db")
    if not os.path.exists(path):
        return []
    try:
        db = sqlite3.connect(f"file:{path}?mode=ro", uri=True)
        try:
            (number,) = db.execute("PRAGMA user_version").fetchone()
        finally:
            db.close()
    except sqlite3.Error as failure:
        return [check("store", False, f"{path}: {failure}", "see daemon.log")]
    return [check("store", True, f"schema {number}, in {path}")]
