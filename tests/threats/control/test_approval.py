"""CTL-03: nobody approves their own request, nor twice, nor late, nor something else than was asked."""

import asyncio
import os
import time

import pytest

from atoll import errors
from atoll.core import Core
from atoll.core.access import terminal_presence as presence
from atoll.core.access.approvals import digest
from atoll.core.access.credentials import KeyHolder
from atoll.core.access.principals import Principal, local
from atoll.model import CreateSandbox, ExecSpec, convert


def key(name: str, *scopes: str) -> KeyHolder:
    return KeyHolder(f"key:{name}", 65534, 65534, "key", name, name, scopes)


AGENT, TWIN, BOSS, OTHER = key("agent", "use"), key("agent", "use", "approve"), key("boss", "approve"), key("x", "use")
ME = local(os.geteuid(), os.getegid())


async def asked(core: Core, who: Principal = AGENT, action: str = "drop the table") -> str:
    sandbox = await core.sandboxes.create(who, CreateSandbox())
    return (await core.approvals.request(who, sandbox.id, action)).id


async def test_the_requester_and_its_kind_are_refused(core: Core) -> None:
    approval = await asked(core)
    for who in (AGENT, TWIN):
        with pytest.raises(errors.PermissionDenied):
            await core.approvals.decide(who, approval, True)
    with pytest.raises(errors.NotFound):  # another key without the scope does not even see it
        await core.approvals.decide(OTHER, approval, True)
    with pytest.raises(errors.NotFound):
        await core.approvals.wait(BOSS, approval)
    assert (await core.approvals.get(AGENT, approval)).status == "pending"


async def test_a_local_caller_without_a_terminal_is_refused(core: Core) -> None:
    approval = await asked(core, ME)
    for pid in (0, os.getpid()):
        presence.PEER_PID.set(pid)
        for answer in (None, "", "000000"):
            with pytest.raises(errors.PermissionDenied):
                await core.approvals.decide(ME, approval, True, answer=answer)
    presence.PEER_PID.set(0)
    with pytest.raises(errors.PermissionDenied):
        await core.approvals.challenge(ME, approval)


async def test_an_approval_counts_once(core: Core) -> None:
    approval = await asked(core)
    await core.approvals.decide(BOSS, approval, True, "fine")
    with pytest.raises(errors.FailedPrecondition):
        await core.approvals.decide(BOSS, approval, False)
    found = await core.approvals.wait(AGENT, approval)
    assert (found.status, found.reason, found.decided_by) == ("approved", "fine", "key:boss")
    with pytest.raises(errors.FailedPrecondition):
        await core.approvals.wait(AGENT, approval)
    with pytest.raises(errors.FailedPrecondition):
        await core.approvals.decide(BOSS, approval, True)


async def test_of_many_waiters_one_gets_it(core: Core) -> None:
    approval = await asked(core)
    waiters = [asyncio.ensure_future(core.approvals.wait(AGENT, approval)) for _ in range(8)]
    await asyncio.sleep(0)
    await core.approvals.decide(BOSS, approval, True)
    results = await asyncio.gather(*waiters, return_exceptions=True)
    assert sum(1 for result in results if getattr(result, "status", "") == "approved") == 1
    assert sum(1 for result in results if isinstance(result, errors.FailedPrecondition)) == 7


async def test_two_decisions_at_once_are_one(core: Core) -> None:
    approval = await asked(core)
    made = await asyncio.gather(
        *(core.approvals.decide(BOSS, approval, n % 2 == 0) for n in range(8)), return_exceptions=True
    )
    assert sum(1 for one in made if not isinstance(one, BaseException)) == 1


async def test_an_expired_one_cannot_be_approved(core: Core) -> None:
    approval = await asked(core)
    core.store.move_approval(approval, "pending", expires_at=time.time() - 0.001)
    with pytest.raises(errors.FailedPrecondition, match="expired"):
        await core.approvals.decide(BOSS, approval, True)
    with pytest.raises(errors.Timeout):
        await core.approvals.wait(AGENT, approval)
    assert await core.approvals.pending(BOSS) == []


async def test_expiry_wakes_who_waits(core: Core) -> None:
    approval = await asked(core)
    core.store.move_approval(approval, "pending", expires_at=time.time() + 0.3)
    async with asyncio.timeout(60):
        with pytest.raises(errors.Timeout):
            await core.approvals.wait(AGENT, approval)


async def test_it_is_bound_to_its_sandbox_and_its_words(core: Core) -> None:
    approval = await asked(core)
    row = core.store.approval(approval)
    assert row is not None
    assert row["digest"] == digest(row["sandbox_id"], "action", "drop the table")
    assert row["digest"] != digest(row["sandbox_id"], "action", "drop the tables")
    await core.sandboxes.destroy(AGENT, row["sandbox_id"])
    with pytest.raises(errors.FailedPrecondition, match="ended"):
        await core.approvals.decide(BOSS, approval, True)


async def test_another_tenant_cannot_ask_for_or_wait_in_a_foreign_sandbox(core: Core) -> None:
    approval = await asked(core)
    row = core.store.approval(approval)
    assert row is not None
    with pytest.raises(errors.NotFound):
        await core.approvals.request(OTHER, row["sandbox_id"], "x")
    assert await core.approvals.pending(OTHER) == []


async def test_the_words_shown_to_the_approver_are_the_words_that_run(core: Core) -> None:
    """A rule's command runs only as it was shown, and only after it was approved."""
    spec = convert(CreateSandbox, {"require_approval": ["command:*danger*"]})
    sandbox = await core.sandboxes.create(AGENT, spec)
    running = asyncio.ensure_future(core.commands.exec(AGENT, sandbox.id, ExecSpec(command="echo danger", cwd="/tmp")))
    async with asyncio.timeout(60):
        while not (waiting := await core.approvals.pending(BOSS)):
            await asyncio.sleep(0.01)
    assert (waiting[0].kind, waiting[0].action) == ("command", "echo danger\nworking directory: /tmp")
    assert await core.commands.list(AGENT, sandbox.id) == [], "nothing has run"
    await core.approvals.decide(BOSS, waiting[0].id, True)
    assert (await running).stdout == "danger\n"
    again = asyncio.ensure_future(core.commands.exec(AGENT, sandbox.id, ExecSpec(command="echo danger", cwd="/tmp")))
    async with asyncio.timeout(60):
        while not (waiting := await core.approvals.pending(BOSS)):
            await asyncio.sleep(0.01)
    await core.approvals.decide(BOSS, waiting[0].id, False, "not again")
    with pytest.raises(errors.PermissionDenied, match="not again"):
        await again
