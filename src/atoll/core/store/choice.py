"""Which database holds the records: the home's own file, or the PostgreSQL that the operator names."""

import logging
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Literal

from atoll.core.store.database import Database
from atoll.core.store.sqlite import SqliteConnection, SqliteDatabase
from atoll.errors import FailedPrecondition

log = logging.getLogger("atoll.store")

Use = Literal["records", "keys"]


def chosen_database(home: Path, database_file: str) -> Callable[[Use], Database]:
    """Return a function that opens a connection for one use. `database_file` holds a connection string of PostgreSQL."""
    if not database_file:
        file = home / "atoll.db"
        return lambda use: SqliteDatabase(file) if use == "records" else SqliteConnection(file)
    from atoll.core.store.postgres import PostgresDatabase

    try:
        words = Path(database_file).read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise FailedPrecondition(
            f"the connection string of PostgreSQL cannot be read: {error}",
            hint="put it into the file that `database_file` in [storage] of config.toml names",
        ) from None
    return lambda use: PostgresDatabase(words, _leave if use == "records" else None)


def _leave() -> None:
    """End this daemon as its operator would: another one serves its sandboxes now."""
    log.error("another gateway serves from this database: this one ends, and its sandboxes go on")
    os.kill(os.getpid(), signal.SIGTERM)
