"""Whether the cluster still enforces the policies of pods: canaries are dialled now and then, from pods in use and in pools.

An enforcer that has died leaves old pods shut and new ones open, and says nothing. So on each node the newest pod of a
pool is asked, and one that is in use. While any of them gets out, no sandbox is made.
"""

import asyncio
import logging
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from atoll.backends.kubernetes.agents import Agents
from atoll.backends.kubernetes.canaries import canaries
from atoll.errors import AtollError, Unsupported

log = logging.getLogger("atoll.kubernetes")

AT_ONCE = 8


@dataclass(frozen=True, slots=True)
class Candidate:
    """A pod whose agent can be asked to dial."""

    pod: str
    node: str
    address: str
    fingerprint: str
    in_use: bool
    made: str  # when, in the cluster's form: later is greater


class Enforcement:
    """One task for the whole namespace. `candidates` are the pods that can be asked now."""

    def __init__(
        self,
        agents: Agents,
        api_server: Callable[[], tuple[str, int]],
        candidates: Callable[[], Iterable[Candidate]],
        every_s: float,
    ) -> None:
        self._agents = agents
        self._api_server = api_server
        self._candidates = candidates
        self._every_s = every_s
        self._open: dict[str, str] = {}  # node: pod that got out
        self._task: asyncio.Task[None] | None = None
        self.rounds = 0

    def start(self) -> None:
        self._task = asyncio.create_task(self._run(), name="canaries")

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def check(self) -> None:
        """Raise if a pod got out at the last look and still does."""
        if self._open:
            await self._look()
        for node, pod in self._open.items():
            raise Unsupported(
                f"the network policy does not hold on node {node}: pod {pod} reaches what it must not",
                hint="see that the cluster's network policy engine runs on that node, then delete the pod",
                details={"reason": "egress_unenforceable", "node": node, "pod": pod},
            )

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(self._every_s * random.uniform(0.8, 1.2))
            await self._look()

    async def _look(self) -> None:
        """Let the chosen pods dial. One that does not answer says nothing: its node keeps what was known of it."""
        asked = choose(self._candidates())
        places = asyncio.Semaphore(AT_ONCE)
        nodes = {one.node for one in asked}
        open_before, found = self._open, {}

        async def ask(one: Candidate) -> None:
            async with places:
                if (gets_out := await self._gets_out(one)) is None:
                    nodes.discard(one.node)
                elif gets_out:
                    found[one.node] = one.pod

        await asyncio.gather(*(ask(one) for one in asked))
        there = {one.node for one in self._candidates()}
        kept = {node: pod for node, pod in open_before.items() if node in there and node not in nodes}
        self._open = {**kept, **found}
        for node, pod in self._open.items():
            if node not in open_before:
                log.error(
                    "the network policy does not hold on node %s: pod %s gets out; creates are refused", node, pod
                )
        for node in open_before.keys() - self._open.keys():
            log.warning("the network policy holds on node %s again", node)
        self.rounds += 1

    async def _gets_out(self, one: Candidate) -> bool | None:
        try:
            async with canaries(one.address, self._api_server()) as addresses:
                return await self._agents.dial_canaries(one.address, one.fingerprint, addresses)
        except (AtollError, OSError) as error:
            log.info("pod %s on node %s could not dial its canaries: %s", one.pod, one.node, error)
            return None


def choose(candidates: Iterable[Candidate]) -> list[Candidate]:
    """Return of each node the newest pod of a pool, and any one that is in use."""
    chosen: dict[tuple[str, bool], Candidate] = {}
    for one in sorted(candidates, key=lambda one: one.made if not one.in_use else str(random.random())):
        chosen[one.node, one.in_use] = one
    return list(chosen.values())
