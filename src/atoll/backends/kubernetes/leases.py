"""Renews the deadlines of living sandboxes, so that only those end that no gateway knows."""

import asyncio
import logging
from collections.abc import Callable

from atoll.backends.kubernetes.box import KubernetesBox
from atoll.backends.kubernetes.claims import Claims
from atoll.errors import AtollError

log = logging.getLogger("atoll.kubernetes")

LEAST = 60.0  # seconds between two renewals of one sandbox
LOOKS = 4  # per renewal


class Leases:
    """One task for all sandboxes. A renewal that fails is tried again at the next look."""

    def __init__(self, claims: Claims, lease_s: float, boxes: Callable[[], list[KubernetesBox]]) -> None:
        self._claims = claims
        self._every = max(lease_s / 3, min(LEAST, lease_s / 2))
        self._boxes = boxes
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._run(), name="leases")

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def begin(self, box: KubernetesBox) -> None:
        """Count from now: its claim was made or renewed just before."""
        box.renew_at = asyncio.get_running_loop().time() + self._every

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(self._every / LOOKS)
            for box in self._boxes():
                if box.renew_at <= loop.time():
                    await self._renew(box)
            try:
                await self._claims.renew_stopped()
            except AtollError as error:
                log.warning("the lease of a stopped sandbox was not renewed: %s", error.message)

    async def _renew(self, box: KubernetesBox) -> None:
        identity = box.identity
        try:
            await self._claims.renew(identity.claim, identity.claim_uid)
        except AtollError as error:
            log.warning("the lease of sandbox %s was not renewed: %s", box.id, error.message)
            return
        self.begin(box)
