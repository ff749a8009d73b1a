"""Fingerprints of agents, read from the log of pods that are not in use yet, ahead of time where possible."""

import asyncio
import logging
import re

from atoll.backends.kubernetes import names
from atoll.backends.kubernetes.api import Cluster, Object
from atoll.backends.kubernetes.watching import Watch
from atoll.errors import AtollError, Unavailable

log = logging.getLogger("atoll.kubernetes")

_LINE = re.compile(r"atoll-agent (?P<version>\S{1,64}) (?P<fingerprint>[0-9a-f]{64})$")
LOG_BYTES = 256
AT_ONCE = 8  # logs that are read at the same time ahead of need
PAUSE, PATIENCE = 0.05, 10.0  # for the line to appear


class Fingerprints:
    """By the UID of the pod. A pod that may have run a caller's code is never asked: its log is not trusted."""

    def __init__(self, cluster: Cluster, pods: Watch) -> None:
        self._cluster = cluster
        self._pods = pods
        self._known: dict[str, str] = {}
        self._reading: dict[str, asyncio.Task[str]] = {}
        self._places = asyncio.Semaphore(AT_ONCE)

    def start(self) -> None:
        self._pods.follow_all(self._prefetch)

    async def close(self) -> None:
        tasks = list(self._reading.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def read(self, pod: str, uid: str) -> str:
        """Return the fingerprint of a pod's agent. The caller knows that the pod was not activated yet."""
        if uid in self._known:
            return self._known.pop(uid)
        task = self._reading.get(uid)
        if task is None:
            return await self._read(pod)
        try:
            return await asyncio.shield(task)
        finally:
            self._known.pop(uid, None)

    def unused(self) -> list[tuple[Object, str]]:
        """Return the pods of pools whose fingerprint is known, with it."""
        return [(pod, self._known[uid]) for pod in self._pods.all() if (uid := pod["metadata"]["uid"]) in self._known]

    def _prefetch(self, pod: Object) -> None:
        """Read the line of a pool's pod that has become ready."""
        metadata = pod["metadata"]
        uid, unused = metadata["uid"], names.CLAIM_UID not in metadata.get("labels", {})
        if unused and _is_ready(pod) and uid not in self._known and uid not in self._reading:
            task = asyncio.create_task(self._remember(metadata["name"], uid), name="fingerprint")
            self._reading[uid] = task
            task.add_done_callback(lambda _: self._done(uid))
            self._forget_others()

    def _done(self, uid: str) -> None:
        task = self._reading.pop(uid)
        if not task.cancelled():
            task.exception()  # was logged

    async def _remember(self, pod: str, uid: str) -> str:
        async with self._places:
            try:
                found = await self._read(pod)
            except AtollError as error:
                log.info("no fingerprint of the pooled pod %s yet: %s", pod, error.message)
                raise
        self._known[uid] = found
        return found

    def _forget_others(self) -> None:
        there = {pod["metadata"]["uid"] for pod in self._pods.all()}
        for uid in [uid for uid in self._known if uid not in there]:
            del self._known[uid]

    async def _read(self, pod: str) -> str:
        deadline = asyncio.get_running_loop().time() + PATIENCE
        while True:
            text = await self._cluster.log(pod, names.CONTAINER, LOG_BYTES)
            first = text.split("\n", 1)[0]
            if match := _LINE.match(first):
                return match["fingerprint"]
            if "\n" in text or asyncio.get_running_loop().time() > deadline:
                raise Unavailable(f"pod {pod} does not begin with the agent's line: {first[:100]!r}")
            await asyncio.sleep(PAUSE)


def _is_ready(pod: Object) -> bool:
    conditions = pod.get("status", {}).get("conditions", ())
    return any(one.get("type") == "Ready" and one.get("status") == "True" for one in conditions)
