"""What the store asks of a database, and the two ways in which one refuses."""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from atoll import errors

Values = Mapping[str, Any]


class StoreFailed(errors.Unavailable):
    """The store cannot be read or written now. `full`: for want of space; `damaged`: its file is no database, or a broken one."""

    def __init__(self, why: object, *, hint: str = "see daemon.log", full: bool = False, damaged: bool = False) -> None:
        self.full, self.damaged = full, damaged
        super().__init__(f"the store cannot be used: {why}", hint=hint)


class Taken(Exception):
    """A row with this key is there already."""


class Database(Protocol):
    """Carries out statements that SQLite and PostgreSQL both understand; `?` stands for a value.

    Outside a transaction every statement counts at once. A statement that cannot be carried out is a StoreFailed.
    """

    low: bool  # there is no room but what is kept for endings

    def rows(self, query: str, *values: Any) -> Sequence[Values]:
        """Return all rows of a query, by the names of their columns."""

    def row(self, query: str, *values: Any) -> Values | None:
        """Return the first row of a query; None if it has none."""

    def change(self, query: str, *values: Any) -> int:
        """Change rows, and return how many. Raise Taken where a key would be there twice."""

    def number(self, query: str, *values: Any) -> int:
        """Insert a row that gets the next number, and return that: numbers are seen in their order."""

    def transaction(self) -> AbstractContextManager[None]:
        """All or nothing, and only one at a time of all that share the database."""

    def top_up(self) -> bool:
        """Keep room for what has to be written when the disk is full; False when there is none to be had."""

    def close(self) -> None:
        """Let go of the database."""
