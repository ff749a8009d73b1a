"""Places that a surface gives its sandboxes and their commands: how many there may be at once.

Nothing waits between counting and taking, so that no two callers take the last place.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from atoll import errors
from atoll.core.access.principals import Principal
from atoll.core.store.records import Store


class Places:
    def __init__(self, store: Store) -> None:
        self._store = store
        self._making: dict[tuple[str, str, str], set[str]] = {}  # aliases, by owner, label and its value
        self._running: Counter[tuple[str, str]] = Counter()  # by owner and sandbox

    @contextmanager
    def sandbox(self, who: Principal, label: str, value: str, alias: str, most: int) -> Iterator[None]:
        """Hold a place while a sandbox with this label and alias is made; Exhausted when `most` with the label live."""
        key = (who.owner, label, value)
        making = self._making.get(key, set())
        specs = [row["spec"] for row in self._store.list_sandboxes(who.owner, ("running", "paused", "ending"), None)]
        alike = [spec for spec in specs if spec.get("labels", {}).get(label) == value]
        if sum(1 for spec in alike if spec.get("alias") not in making) + len(making) >= most:
            raise errors.Exhausted(f"{most} sandboxes are the most at once")
        self._making.setdefault(key, making).add(alias)
        try:
            yield
        finally:
            making.discard(alias)
            if not making:
                self._making.pop(key, None)

    @contextmanager
    def command(self, who: Principal, sandbox: str, most: int) -> Iterator[None]:
        """Hold a place for one command; Exhausted when `most` run in the sandbox."""
        key = (who.owner, sandbox)
        if self._running[key] >= most:
            raise errors.Exhausted(f"sandbox {sandbox} is running {self._running[key]} command(s) already")
        self._running[key] += 1
        try:
            yield
        finally:
            self._running[key] -= 1
            if not self._running[key]:
                del self._running[key]

    def running(self, who: Principal, sandbox: str) -> int:
        """Return how many commands hold a place in the sandbox."""
        return self._running[who.owner, sandbox]
