"""Notes of a surface about a sandbox, which core does not read: kept in its record, gone with it."""

from atoll import errors
from atoll.core.access.audited_verbs import Part, verb
from atoll.core.access.principals import Principal
from atoll.core.sandboxes.verbs import Sandboxes
from atoll.core.store.records import Store
from atoll.core.store.typed import Notes as Written

MOST = 64 * 1024  # characters of one surface's notes about one sandbox


class Notes(Part):
    """The notes of all surfaces."""

    def __init__(self, sandboxes: Sandboxes, store: Store) -> None:
        self._sandboxes = sandboxes
        self._store = store

    @verb("notes.get")
    async def get(self, who: Principal, ref: str, surface: str) -> Written:
        """Return what this surface has noted; empty when nothing."""
        noted = self._sandboxes.known(who, ref)["record"].get("notes", {}).get(surface, {})
        return noted

    @verb("notes.change")
    async def change(self, who: Principal, ref: str, surface: str, noted: Written) -> None:
        """Replace what this surface has noted."""
        if len(str(noted)) > MOST:
            raise errors.TooLarge(f"more than {MOST} characters cannot be noted about a sandbox")
        sandbox = self._sandboxes.known(who, ref)["id"]
        row = self._store.sandbox(sandbox)
        if row is None or row["state"] in ("ending", "ended"):
            raise errors.FailedPrecondition("the sandbox has ended")
        notes = {**row["record"].get("notes", {}), surface: noted}
        self._store.update_sandbox(sandbox, record={**row["record"], "notes": notes})
