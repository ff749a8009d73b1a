"""How far an image is, on stderr, while a sandbox is made from it: a bar at a terminal, a line every few seconds else."""

from __future__ import annotations

from ..client.http import FRAMES
from ..client.outcome import ATTEMPTS
from ..client.results import Event
from ..errors import OutcomeUnknown, Unavailable
from .output import program_name, say

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

    from ..client._sync.driver import Link
    from ..client.calls import Call


def tell_entry(fields: Mapping[str, object]) -> None:
    """Say which entry of a manifest is begun."""
    say(f"{program_name()}: entry {fields['entry']}/{fields['of']}: {fields['does']}")


class Shown:
    """Progress as it is shown; nothing is imported or printed until there is some."""

    def __init__(self) -> None:
        self._bar: Any = None

    def show(self, fields: Mapping[str, Any]) -> None:
        from ..images.progress import Progress, TerminalBar

        if self._bar is None:
            self._bar = TerminalBar()
        self._bar(Progress(**fields))

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()


def create_watched(link: Link, call: Call) -> Any:
    """Make a sandbox and show how far its image is meanwhile; return the sandbox. A lost answer is asked for again."""
    call.headers = (*call.headers, ("Accept", FRAMES))
    call.timeout = None
    for _ in range(ATTEMPTS - 1):
        try:
            return _watch(link, call)
        except Unavailable:
            if not call.repeatable:
                raise
    return _watch(link, call)


def _watch(link: Link, call: Call) -> Any:
    shown = Shown()
    try:
        exchange = link.open(call)
        exchange.raise_for_status()
        for value in exchange.frames():
            if isinstance(value, Event) and "progress" in value.data:
                shown.show(value.data["progress"])
            elif isinstance(value, Event) and "entry" in value.data:
                tell_entry(value.data)
            elif isinstance(value, dict):
                return value
    finally:
        shown.close()
    raise OutcomeUnknown("the daemon ended the stream before the sandbox was there")
