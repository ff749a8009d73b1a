"""The runtimes of a cluster: which RuntimeClass each is, and whether a sandbox really starts with it."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping

from atoll.backends.contract import RuntimeStatus
from atoll.backends.kubernetes.api import RUNTIME_CLASSES, Cluster
from atoll.backends.kubernetes.pools import ADD_POOL, Pool, Pools
from atoll.errors import AtollError, InvalidArgument, Unsupported

# Strongest first: `auto` takes the first that works. The handlers are those of usual installations.
HANDLERS: Mapping[str, tuple[str, ...]] = {
    "firecracker": ("firecracker", "kata-fc"),
    "kata": ("kata", "kata-qemu", "kata-clh"),
    "gvisor": ("runsc",),
    "container": ("", "runc"),
}
TRY_AGAIN = 10.0  # seconds after a probe that failed


class Runtimes:
    """Probes: a runtime works once a sandbox of one of its pools has answered."""

    def __init__(
        self,
        cluster: Cluster,
        pools: Pools,
        chosen: Mapping[str, str],
        probe: Callable[[Pool], Awaitable[None]],
    ) -> None:
        self._cluster = cluster
        self._pools = pools
        self._chosen = chosen
        self._probe = probe
        self._known: dict[str, tuple[float, RuntimeStatus]] = {}
        self._locks: dict[str, asyncio.Lock] = {}

    def worked(self, runtime: str) -> None:
        """Note that a sandbox of this runtime has answered."""
        status = self._known.get(runtime)
        if status is None or not status[1].works:
            self._known[runtime] = (time.monotonic(), RuntimeStatus(runtime, True, engine="kubernetes"))

    def doubt(self, runtime: str) -> None:
        """Try the runtime out again before it is used next."""
        self._known.pop(runtime, None)

    async def all(self) -> list[RuntimeStatus]:
        return list(await asyncio.gather(*(self.status(name) for name in HANDLERS)))

    async def status(self, runtime: str) -> RuntimeStatus:
        async with self._locks.setdefault(runtime, asyncio.Lock()):
            at, known = self._known.get(runtime, (0.0, None))
            if known is not None and (known.works or time.monotonic() - at < TRY_AGAIN):
                return known
            found = await self._look(runtime)
            self._known[runtime] = (time.monotonic(), found)
            return found

    async def pick(self, runtime: str) -> str:
        """Return the strongest that works, for `auto`; a named one is never replaced by another."""
        if runtime not in ("auto", "", *HANDLERS):
            raise InvalidArgument(f"no runtime is called {runtime[:64]!r}", hint=", ".join(("auto", *HANDLERS)))
        named = runtime in HANDLERS
        reasons, fix = [], ADD_POOL
        for name in [runtime] if named else HANDLERS:
            if not named and not self._pools.of_runtime(name):
                continue
            status = await self.status(name)
            if status.works:
                return name
            reasons.append(f"the {name} runtime does not work in this cluster: {status.why}")
            fix = status.fix or fix
        raise Unsupported("; ".join(reasons) or "the namespace has no pools", hint=fix)

    async def _look(self, runtime: str) -> RuntimeStatus:
        pools = self._pools.of_runtime(runtime)
        if not pools:
            return RuntimeStatus(runtime, False, "no pool has it", ADD_POOL)
        if all(pool.problems for pool in pools):
            problem = pools[0].problems[0]
            return RuntimeStatus(runtime, False, f"{problem.where}: {problem.what}", problem.fix)
        pool = next(pool for pool in pools if not pool.problems)
        try:
            if why := await self._wrong_class(runtime, pool):
                return RuntimeStatus(runtime, False, why, f"change the template of the pool {pool.name}")
            await self._probe(pool)
        except AtollError as error:
            return RuntimeStatus(runtime, False, error.message, error.hint)
        return RuntimeStatus(runtime, True, engine="kubernetes")

    async def _wrong_class(self, runtime: str, pool: Pool) -> str:
        """Return why a pool's RuntimeClass cannot be this runtime; nothing if it can."""
        name = pool.runtime_class
        if self._chosen.get(runtime, name) != name:
            return f"its class is {name!r}, and the operator's is {self._chosen[runtime]!r}"
        if not name:
            return "" if runtime == "container" else f"the pool {pool.name} names no RuntimeClass"
        classes = await self._cluster.list(RUNTIME_CLASSES)
        handlers = {one["metadata"]["name"]: str(one.get("handler", "")) for one in classes["items"]}
        if name not in handlers:
            there = ", ".join(sorted(handlers)) or "none"
            return f"RuntimeClass {name!r} does not exist; there are {there}"
        if runtime in self._chosen or handlers[name] in HANDLERS[runtime]:
            return ""
        return f"RuntimeClass {name!r} has the handler {handlers[name]!r}, which is not known as {runtime}"
