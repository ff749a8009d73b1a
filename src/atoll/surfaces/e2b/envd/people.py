"""The users inside a sandbox: who is meant by a name, and what the path of a request means for them."""

import re
import time
from dataclasses import dataclass

from atoll import errors
from atoll.core import Core
from atoll.core.access.principals import Principal

USUAL = "user"
ROOT = "root"
HOST = "host"  # the image whose usual user is known without a look
FRESH = 5.0  # seconds for which what was read counts; a name that is not there is looked for anew at once
REMEMBERED = 1000
_NAME = re.compile(r"[a-z_][a-z0-9_-]{0,31}\Z")


@dataclass(frozen=True, slots=True)
class Person:
    name: str
    uid: int
    gid: int
    home: str


@dataclass(frozen=True, slots=True)
class People:
    """All users and groups of one sandbox."""

    users: dict[str, Person]
    owners: dict[int, str]
    groups: dict[int, str]

    def usual(self) -> Person:
        """Return the user whose name need not be said."""
        return self.users.get(USUAL) or self.users.get(ROOT) or Person(ROOT, 0, 0, "/root")


class PeopleCache:
    """Keeps the users of each sandbox for a moment after they were read."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._read: dict[str, tuple[float, People]] = {}

    async def of(self, who: Principal, sandbox: str) -> People:
        at, found = self._read.get(sandbox, (0.0, None))
        if found is not None and time.monotonic() - at < FRESH:
            return found
        return await self._look(who, sandbox)

    async def find(self, who: Principal, sandbox: str, name: str) -> Person:
        """Return the user of this name, the usual one for none; Unauthenticated when the sandbox has no such user."""
        people = await self.of(who, sandbox)
        if not name:
            return people.usual()
        if not _NAME.match(name):
            raise errors.Unauthenticated(f"invalid username: {name!r:.80}")
        if name not in people.users:
            people = await self._look(who, sandbox)
        if name not in people.users:
            raise errors.Unauthenticated(f"no user named {name!r:.80} in the sandbox")
        return people.users[name]

    async def starter(self, who: Principal, sandbox: str, name: str, image: str) -> Person:
        """Return whom a process is started as. The agent looks the name up itself, so that a guess at the home is enough."""
        if not name and image == HOST:
            return Person(USUAL, 1000, 1000, f"/home/{USUAL}")
        return await self.find(who, sandbox, name)

    async def _look(self, who: Principal, sandbox: str) -> People:
        told = await self._core.files.accounts(who, sandbox)
        users = {one["name"]: Person(one["name"], one["uid"], one["gid"], one["home"] or "/") for one in told["users"]}
        owners = {person.uid: person.name for person in reversed(users.values())}
        groups = {one["gid"]: one["name"] for one in reversed(told["groups"])}
        if len(self._read) >= REMEMBERED:
            self._read.clear()
        people = People(users, owners, groups)
        self._read[sandbox] = (time.monotonic(), people)
        return people


def resolve(path: str, person: Person) -> str:
    """Return the absolute path that is meant: relative to the home, which `~` stands for too."""
    if path in ("", "~"):
        return person.home
    if path.startswith("~/"):
        return f"{person.home}/{path[2:].lstrip('/')}"
    if path.startswith("~"):
        raise errors.InvalidArgument("only `~` and `~/...` are expanded")
    return path if path.startswith("/") else f"{person.home}/{path}"
