"""Connections of sandboxes that a rule `host:GLOB` holds until somebody has decided.

One question for each sandbox, name and port, however often a program tries. What was decided counts for five minutes of new
connections, so that a download with many of them, or a client that gives up and tries again, asks once. Nobody there to
decide, a sandbox that stops and a daemon that ends are all a no.
"""

import asyncio
import logging
import time

from atoll import errors
from atoll.core.access.approvals import LIFETIME, Approvals
from atoll.core.access.principals import Principal
from atoll.core.policy.network import Network
from atoll.core.sandboxes.verbs import Sandboxes
from atoll.core.store.records import Store
from atoll.model import Blocked

log = logging.getLogger("atoll.connections")

REMEMBERED = 4096
KIND = "host"
WAITS = "waits for approval"
_Key = tuple[str, str, int]


class Connections:
    """Asks on behalf of the broker, which waits meanwhile."""

    def __init__(self, approvals: Approvals, sandboxes: Sandboxes, store: Store, network: Network) -> None:
        self._approvals = approvals
        self._sandboxes = sandboxes
        self._store = store
        self._asking: dict[_Key, asyncio.Task[str]] = {}
        self._decided: dict[_Key, tuple[float, str]] = {}
        network.on_ask = self.ask
        network.on_left = self.forget

    def withdraw_left_over(self) -> None:
        """At the start: nobody waits any more for what an earlier daemon asked."""
        for row in self._store.approvals(None):
            if row["kind"] == KIND:
                self._store.move_approval(row["id"], "pending", status="withdrawn", decided_at=time.time())

    async def ask(self, sandbox: str, name: str, port: int) -> str:
        """Nothing when the connection may be, else why not."""
        key = (sandbox, name, port)
        until, why = self._decided.get(key, (0.0, ""))
        if time.monotonic() < until:
            return why
        task = self._asking.get(key)
        if task is None:
            task = self._asking[key] = asyncio.create_task(self._ask(key))
            task.add_done_callback(lambda _: self._asking.pop(key, None))
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            if not task.cancelled():
                raise
            return "needs approval, which nobody waits for any more"

    def forget(self, sandbox: str) -> None:
        """It has lost its network: what was decided counts no more, and what is asked is withdrawn."""
        for key in [key for key in self._decided if key[0] == sandbox]:
            del self._decided[key]
        for key, task in list(self._asking.items()):
            if key[0] == sandbox:
                task.cancel()

    async def close(self) -> None:
        tasks = list(self._asking.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _ask(self, key: _Key) -> str:
        sandbox, name, port = key
        live = next((live for (_, found), live in self._sandboxes.live.items() if found == sandbox), None)
        if live is None:
            return "needs approval, and the sandbox is not running"
        who = Principal(live.owner, -1, -1, "sandbox")
        waiting: Blocked = {
            "name": name, "address": "", "port": port, "protocol": "tcp", "reason": WAITS, "note": "",
        }  # fmt: skip
        try:
            asked = await self._approvals.request(who, sandbox, f"connect to {name}:{port}", KIND, live.callers)
            waiting["note"] = f"held: {name}:{port} {WAITS}; decide with: atoll sandbox approve {asked.id}"
            live.blocked.append((time.time(), waiting))  # a program may give up before anybody has decided
            found = await self._approvals.wait(who, asked.id)
        except errors.Timeout:
            return "needs approval, and nobody decided in time"
        except errors.AtollError as error:
            log.info("approval of %s:%d for %s: %s", name, port, sandbox, error)
            return f"needs approval, which cannot be asked for: {error.message}"
        finally:
            for entry in [entry for entry in live.blocked if entry[1] is waiting]:
                live.blocked.remove(entry)
        why = "" if found.status == "approved" else "needs approval, and was rejected"
        if why and found.reason:
            why += f": {found.reason[:200]}"
        while len(self._decided) >= REMEMBERED:
            del self._decided[next(iter(self._decided))]
        self._decided[key] = (time.monotonic() + LIFETIME, why)
        return why
