"""The verbs of what has happened: a window of a transcript, and events."""

from atoll.core.access.audited_verbs import Part, verb
from atoll.core.access.principals import Principal
from atoll.core.commands.history import Event, History, Window, check_window
from atoll.core.sandboxes.verbs import Sandboxes


class Transcript(Window):
    sandbox_id: str


class Past(Part):
    def __init__(self, sandboxes: Sandboxes, history: History) -> None:
        self._sandboxes = sandboxes
        self._history = history

    @verb("history.transcript")
    async def transcript(self, who: Principal, ref: str, offset: int, limit: int) -> Transcript:
        """Return a window of what was typed and printed in a sandbox."""
        check_window(offset, limit)
        sandbox = self._sandboxes.known(who, ref)["id"]
        return {"sandbox_id": sandbox, **self._history.window(sandbox, offset, limit)}

    @verb("history.events")
    async def events(
        self, who: Principal, ref: str | None, limit: int, after: int | None = None, kind: str | None = None
    ) -> tuple[list[Event], bool]:
        """Return the last events, or the next `after` one, oldest first; and whether there are more.

        They are those of one sandbox, or of all that the caller owns.
        """
        sandbox = None if ref is None else self._sandboxes.known(who, ref)["id"]
        found = self._history.events(who.owner, sandbox, limit + 1, after, kind)
        return (found[:limit] if after is not None else found[-limit:]), len(found) > limit
