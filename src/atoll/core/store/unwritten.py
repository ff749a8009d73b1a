"""Changes to sandboxes that could not be written into the store yet: kept in order, shown meanwhile, tried again.

Only endings come here. Everything else is refused when it cannot be written down; an ending is done first and written when
the store takes it.
"""

import logging
from collections.abc import Callable
from typing import Any, cast

from atoll.core.store.database import StoreFailed
from atoll.core.store.typed import SandboxChange

log = logging.getLogger("atoll.store")

Write = Callable[[], object]


class Unwritten:
    def __init__(self) -> None:
        self._writes: dict[str, list[Write]] = {}
        self._values: dict[str, SandboxChange] = {}

    def write(self, sandbox: str, write: Write, **values: Any) -> None:
        """Write it now, or when the store can be written again. `values` are what the row says afterwards."""
        if not self._writes.get(sandbox) or self._settle(sandbox):
            try:
                write()
                return
            except StoreFailed as failed:
                log.error("sandbox %s: that it is %s could not be recorded: %s", sandbox, values.get("state"), failed)
        self._writes.setdefault(sandbox, []).append(write)
        self._values.setdefault(sandbox, {}).update(cast("SandboxChange", values))

    def settle(self) -> None:
        """Try again all that waits."""
        for sandbox in list(self._writes):
            if not self._settle(sandbox):
                return

    def of(self, sandbox: str) -> SandboxChange:
        """Return the unwritten changes of this sandbox's row; empty where all is written."""
        return self._values.get(sandbox, {})

    def ids(self) -> list[str]:
        return list(self._writes)

    def _settle(self, sandbox: str) -> bool:
        waiting = self._writes[sandbox]
        while waiting:
            try:
                waiting[0]()
            except StoreFailed:
                return False
            waiting.pop(0)
        del self._writes[sandbox]
        self._values.pop(sandbox, None)
        log.info("sandbox %s: what could not be recorded is on record now", sandbox)
        return True
