"""The latest refusals of each sandbox, kept by the daemon for a while also after it is gone."""

from collections import OrderedDict, deque
from typing import Final

from atoll.egress.broker.sandbox import EgressEvent

_KEPT_EVENTS: Final = 1000
_KEPT_SANDBOXES: Final = 512


class Refusals:
    """Bounded on both sides: events of one sandbox, and sandboxes that nobody has a link for any more."""

    def __init__(self) -> None:
        self._kept: OrderedDict[str, deque[EgressEvent]] = OrderedDict()

    def keep(self, event: EgressEvent, living: int) -> None:
        self._kept.setdefault(event.sandbox, deque(maxlen=_KEPT_EVENTS)).append(event)
        self._kept.move_to_end(event.sandbox)
        while len(self._kept) > _KEPT_SANDBOXES + living:
            self._kept.popitem(last=False)

    def of(self, sandbox: str) -> list[EgressEvent]:
        """Oldest first."""
        return list(self._kept.get(sandbox, ()))
