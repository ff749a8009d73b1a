"""Every database that can hold the records, each empty for every test."""

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from lab.postgres import Postgres, postgres
from lab.records import Open

from atoll.core.store.database import Database
from atoll.core.store.postgres import PostgresDatabase
from atoll.core.store.sqlite import SqliteDatabase


@pytest.fixture(scope="package")
def server() -> Iterator[Postgres]:
    directory = Path(tempfile.mkdtemp(prefix="atoll-pg-", dir="/tmp"))
    try:
        with postgres(directory) as found:
            yield found
    finally:
        shutil.rmtree(directory, ignore_errors=True)


@pytest.fixture
def open_postgres(server: Postgres) -> Iterator[Open]:
    """Open one and the same new database of PostgreSQL, as each of several gateways does."""
    words, opened = server.database(), []

    def connect() -> Database:
        opened.append(PostgresDatabase(words))
        return opened[-1]

    yield connect
    for one in opened:
        one.close()


@pytest.fixture(params=["sqlite", "postgres"])
def open_database(request: pytest.FixtureRequest, tmp_path: Path) -> Open:
    """Open the records again and again; what one wrote the next one reads."""
    if request.param == "postgres":
        found: Open = request.getfixturevalue("open_postgres")
        return found
    return lambda: SqliteDatabase(tmp_path / "atoll.db")
