"""Resource use of sandboxes, as the host counts it, now and over the last hour."""

import asyncio
import os
import time
from collections import deque
from contextlib import suppress

from atoll import errors
from atoll.core.access.audited_verbs import Part, verb
from atoll.core.access.principals import Principal
from atoll.core.sandboxes.state import Live
from atoll.core.sandboxes.verbs import Sandboxes
from atoll.model import Metric

EVERY = 5.0  # seconds between two samples, at least
KEPT = 720
BESIDE = 30.0  # seconds between two samples that nobody asked for

Samples = list[Metric]


class Metrics(Part):
    """Samples of living sandboxes. Those of a sandbox are forgotten with it."""

    def __init__(self, sandboxes: Sandboxes) -> None:
        self._sandboxes = sandboxes
        self._samples: dict[str, deque[Metric]] = {}
        self._cpu: dict[str, tuple[float, int]] = {}  # when it was last looked at, and the microseconds used until then

    @verb("metrics")
    async def get(self, who: Principal, ref: str, start: float | None = None, end: float | None = None) -> Samples:
        """Return the samples of that time, the oldest first. A living sandbox has one of now."""
        row = self._sandboxes.known(who, ref)
        live = self._sandboxes.live.get((who.owner, row["id"]))
        if live is not None:
            await self._sample(live)
        found = self._samples.get(row["id"], ())
        return [one for one in found if (start or 0) <= one.at and (end is None or one.at <= end)]

    async def watch(self) -> None:
        """Take samples of all living sandboxes until cancelled."""
        while True:
            for live in list(self._sandboxes.live.values()):
                with suppress(errors.AtollError, OSError):
                    await self._sample(live)
            living = {live.id for live in self._sandboxes.live.values()}
            for gone in self._samples.keys() - living:
                del self._samples[gone]
                self._cpu.pop(gone, None)
            await asyncio.sleep(BESIDE)

    async def _sample(self, live: Live) -> None:
        now = time.time()
        kept = self._samples.setdefault(live.id, deque(maxlen=KEPT))
        if kept and now - kept[-1].at < EVERY:
            return
        used, limits = await live.box.usage(), live.box.facts.limits
        before_at, before = self._cpu.get(live.id, (live.created_at, 0))
        cpu = used.cpu_us or 0
        self._cpu[live.id] = (now, cpu)
        share = 100.0 * max(0, cpu - before) / max(1.0, (now - before_at) * 1e6)
        kept.append(
            Metric(
                at=now,
                cpus=max(1, int(limits.cpus or os.cpu_count() or 1)),
                cpu_percent=round(share, 2),
                memory_bytes=used.memory_bytes or 0,
                memory_total_bytes=limits.memory_mb << 20,
                disk_bytes=used.disk_bytes or 0,
                disk_total_bytes=used.disk_total_bytes or limits.disk_mb << 20,
            )
        )
