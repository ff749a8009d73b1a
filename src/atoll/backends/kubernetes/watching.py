"""One shared watch for all objects of a kind: a copy of them that is kept up to date, and who follows which."""

import asyncio
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from atoll.backends.kubernetes.api import Cluster, Gone, Kind, Object
from atoll.errors import AtollError

log = logging.getLogger("atoll.kubernetes")

PAUSE, MAX_PAUSE = 0.2, 5.0  # between attempts while the API server is away

Listener = Callable[[Object | None], None]  # gets the object, or None when it is gone


class Watch:
    """The objects of one kind in the namespace. Reading costs nothing; listeners are told of changes by name."""

    def __init__(self, cluster: Cluster, kind: Kind, labels: str = "") -> None:
        self._cluster = cluster
        self._kind = kind
        self._labels = labels
        self._objects: dict[str, Object] = {}
        self._listeners: dict[str, list[Listener]] = {}
        self._all: list[Callable[[Object], None]] = []
        self._version = ""
        self._task: asyncio.Task[None] | None = None

    async def read(self) -> None:
        """Read the objects once."""
        await self._list()

    async def start(self) -> None:
        """Read the objects once, then follow them in the background."""
        await self.read()
        self._task = asyncio.create_task(self._follow(), name=f"watch-{self._kind.plural}")

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def get(self, name: str) -> Object | None:
        return self._objects.get(name)

    def all(self) -> list[Object]:
        return list(self._objects.values())

    @contextmanager
    def followed(self, name: str, listener: Listener) -> Iterator[None]:
        """Tell `listener` of every change of this object inside the block."""
        self.follow(name, listener)
        try:
            yield
        finally:
            self.unfollow(name, listener)

    def follow(self, name: str, listener: Listener) -> None:
        self._listeners.setdefault(name, []).append(listener)

    def unfollow(self, name: str, listener: Listener) -> None:
        kept = [one for one in self._listeners.get(name, []) if one != listener]
        if kept:
            self._listeners[name] = kept
        else:
            self._listeners.pop(name, None)

    def follow_all(self, listener: Callable[[Object], None]) -> None:
        """Tell `listener` of every object that is there and of every one that appears or changes."""
        self._all.append(listener)
        for found in self.all():
            listener(found)

    async def _follow(self) -> None:
        pause = PAUSE
        while True:
            try:
                async for event in self._cluster.watch(self._kind, self._version, labels=self._labels):
                    self._take(event)
                    pause = PAUSE
            except Gone:
                self._version = ""
            except AtollError as error:
                log.warning("the watch of %s broke: %s", self._kind.plural, error.message)
                await asyncio.sleep(pause)
                pause = min(pause * 2, MAX_PAUSE)
            if not self._version:
                await self._list_again()

    async def _list_again(self) -> None:
        pause = PAUSE
        while True:
            try:
                return await self._list()
            except AtollError as error:
                log.warning("%s cannot be listed: %s", self._kind.plural, error.message)
                await asyncio.sleep(pause)
                pause = min(pause * 2, MAX_PAUSE)

    async def _list(self) -> None:
        found = await self._cluster.list(self._kind, labels=self._labels)
        self._version = found["metadata"]["resourceVersion"]
        now = {item["metadata"]["name"]: item for item in found["items"]}
        for name in [name for name in self._objects if name not in now]:
            self._set(name, None)
        for name, item in now.items():
            before = self._objects.get(name)
            if before is None or _version(before) != _version(item):
                self._set(name, item)

    def _take(self, event: Object) -> None:
        value = event["object"]
        self._version = _version(value)
        if event["type"] != "BOOKMARK":
            self._set(value["metadata"]["name"], None if event["type"] == "DELETED" else value)

    def _set(self, name: str, value: Object | None) -> None:
        if value is None:
            self._objects.pop(name, None)
        else:
            self._objects[name] = value
            for everyone in self._all:
                everyone(value)
        for listener in list(self._listeners.get(name, ())):
            listener(value)


def _version(value: Object) -> str:
    return str(value["metadata"]["resourceVersion"])
