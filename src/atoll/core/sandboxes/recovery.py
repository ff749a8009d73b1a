"""Reconcile at start: compare the store with what really runs, and make the two agree.

The living are adopted, the dead buried, half-done work finished or undone, and what nobody knows is removed. Overdue
sandboxes are ended before anything is served.
"""

import asyncio
import logging
import time

from atoll import accounts, errors
from atoll.core.commands.verbs import Commands
from atoll.core.policy.network import policy_of
from atoll.core.sandboxes.idle_freeze import rouse
from atoll.core.sandboxes.verbs import Sandboxes
from atoll.core.store.typed import SandboxRow

log = logging.getLogger("atoll.recovery")

AT_ONCE = 16


async def reconcile(sandboxes: Sandboxes, commands: Commands) -> None:
    rows = sandboxes.store.living()
    for row in rows:
        _account(sandboxes, commands, row)
    turn = asyncio.Semaphore(AT_ONCE)

    async def one(row: SandboxRow) -> None:
        async with turn:
            try:
                await _settle(sandboxes, commands, row)
            except (errors.AtollError, OSError):
                log.exception("sandbox %s (%s) could not be reconciled", row["id"], row["state"])

    await asyncio.gather(*(one(row) for row in rows))
    known = {row["id"] for row in sandboxes.store.living()}
    strangers = await sandboxes.backend.sweep(known)
    await _reconnect(sandboxes)
    if strangers:
        log.warning("removed what no record knows: %s", ", ".join(strangers))
    sandboxes.history.purge()


def _account(sandboxes: Sandboxes, commands: Commands, row: SandboxRow) -> None:
    """Charge what it holds on the disk already. A cap that was lowered since ends nothing."""
    size, holders = sandboxes.space.load(row), (accounts.sandbox(row["id"]), accounts.owner(row["owner"]))
    try:
        sandboxes.accounts.charge(accounts.DISK, size, *holders)
    except errors.Exhausted as over:
        log.warning("the disk of sandbox %s is beyond a cap: %s", row["id"], over)
    commands.outputs.count(row["id"], row["owner"])


async def _reconnect(sandboxes: Sandboxes) -> None:
    """Every living sandbox gets its network back with its own policy; one that cannot is ended, never left with another."""
    for sandbox in await sandboxes.backend.reconnect():
        log.error("sandbox %s has lost its network", sandbox)
        await sandboxes.retire(sandbox, "lost", "its network could not be connected again")
    for live in list(sandboxes.live.values()):
        row = sandboxes.store.sandbox(live.id)
        if row is not None and row["record"].get("box") != live.box.record:
            record = {key: value for key, value in row["record"].items() if key != "link"}
            sandboxes.store.update_sandbox(live.id, record={**record, "box": live.box.record})


async def _settle(sandboxes: Sandboxes, commands: Commands, row: SandboxRow) -> None:
    sandbox, state, box_record = row["id"], row["state"], row["record"].get("box")
    overdue = row["expires_at"] is not None and row["expires_at"] <= time.time()
    if state == "creating":
        log.warning("undoing the half-made sandbox %s", sandbox)
        await sandboxes.backend.destroy({"id": sandbox})
        sandboxes.store.forget_sandbox(sandbox)
    elif state == "ending":
        await sandboxes.end(sandbox, row["end_kind"] or "lost", row["end_detail"] or "", row["end_by"] or "atoll")
    elif overdue:
        await sandboxes.end(sandbox, "expired", "", "atoll")
    elif state == "stopping":
        await sandboxes.backend.destroy(box_record or {"id": sandbox}, keep_disk=True)
        sandboxes.store.update_sandbox(sandbox, state="stopped")
    elif state in ("running", "paused"):
        await _adopt(sandboxes, commands, row)


async def _adopt(sandboxes: Sandboxes, commands: Commands, row: SandboxRow) -> None:
    sandbox, persistent = row["id"], bool(row["spec"].get("persistent"))
    record = row["record"]["box"]
    if "link" in row["record"]:  # version 0.1 kept it beside the box
        record = {**record, "link": row["record"]["link"]}
    box = await sandboxes.backend.adopt(record, policy_of(row["record"]), keep_disk=persistent)
    detail = "it ended while the daemon was away"
    if box is None and persistent:
        sandboxes.store.update_sandbox(sandbox, state="stopped", end_kind="lost", end_detail=detail, end_by="atoll")
        sandboxes.history.record(sandbox, row["owner"], "stopped", reason="lost", detail=detail, by="atoll")
        return
    if box is None:
        await sandboxes.end(sandbox, "lost", detail, "atoll")
        return
    live = sandboxes.adopt(row, box)
    sandboxes.history.record(sandbox, row["owner"], "adopted")
    if live.state == "paused":
        return
    await rouse(box)
    try:
        await commands.starter.recover(live)
    except errors.AtollError as error:
        log.error("sandbox %s lives and its agent does not answer: %s", sandbox, error)
