"""One open door of this surface: core, and what every route needs of it."""

from dataclasses import dataclass, field

from atoll import errors
from atoll.core import Core
from atoll.core.access.principals import Principal
from atoll.core.sandboxes.state import Live
from atoll.model import Extend
from atoll.surfaces.e2b.envd.people import PeopleCache
from atoll.surfaces.e2b.envd.started import Started
from atoll.surfaces.e2b.envd.watchers import Watchers
from atoll.surfaces.e2b.replies import WireError
from atoll.surfaces.e2b.tokens import Tokens
from atoll.surfaces.e2b.words import AUTO_RESUME, TEMPLATE

RESUMED_SECONDS = 300
KNOWN = 10_000  # sandboxes whose owner is remembered


@dataclass
class Settings:
    """Choices of the person who opened the port. `domain` is known once a port is bound."""

    host: str
    domain: str = ""
    runtime: str = "auto"


@dataclass
class Served:
    """Core, the tokens of its sandboxes, and what is remembered of them while the door is open."""

    core: Core
    settings: Settings
    tokens: Tokens = field(init=False)
    people: PeopleCache = field(init=False)
    started: Started = field(init=False)
    watchers: Watchers = field(init=False)

    def __post_init__(self) -> None:
        self.tokens = Tokens(self.core.store)
        self.people = PeopleCache(self.core)
        self.started = Started(self.core)
        self.watchers = Watchers(self.core)
        self.tags: dict[str, list[str]] = {}  # of template builds that have not started
        self._owners: dict[str, str] = {}

    def owner_of(self, sandbox: str) -> str | None:
        """Return whose sandbox this is; None when this surface did not make it or nobody knows it."""
        found = self._owners.get(sandbox)
        if found is None:
            row = self.core.store.sandbox(sandbox)
            if row is None or TEMPLATE not in (row["spec"].get("labels") or {}):
                return None
            if len(self._owners) >= KNOWN:
                self._owners.clear()
            found = self._owners[sandbox] = str(row["owner"])
        return found

    def live(self, owner: str, sandbox: str) -> Live | None:
        return self.core.sandboxes.live.get((owner, sandbox))

    async def reach(self, sandbox: str, owner: str, *, may_resume: bool = False) -> Live:
        """Return the running sandbox. One that is frozen and resumes by itself is thawed for who may come in."""
        live = self.live(owner, sandbox)
        if live is not None and live.state == "paused" and may_resume and AUTO_RESUME in live.spec.labels:
            who = self.core.keeper.stand_in(owner)
            await self.core.sandboxes.resume(who, sandbox)
            await self.core.sandboxes.extend(who, sandbox, Extend(lifetime_s=RESUMED_SECONDS))
        if live is None or live.state != "running":
            raise NotServing(sandbox)
        return live

    def stand_in(self, owner: str) -> Principal:
        return self.core.keeper.stand_in(owner)


class NotServing(WireError):
    """The sandbox cannot serve: it is unknown, has ended or is paused. The SDKs know the message."""

    def __init__(self, sandbox: str, port: int | None = None) -> None:
        text = "The sandbox was not found" if port is None else "The sandbox is running but port is not open"
        super().__init__(502, text, more={"sandboxId": sandbox} | ({} if port is None else {"port": port}))


def unknown(sandbox: str) -> errors.NotFound:
    return errors.NotFound(f"sandbox {sandbox!r:.80} was not found")
