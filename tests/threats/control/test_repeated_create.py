"""A create whose answer was lost is asked again: the same request id is the same sandbox, for one owner."""

import asyncio
import os
import random
import threading
import time

import pytest
from lab.principals import key
from lab.sandboxes import SMALL, Lab, until

import atoll
from atoll import errors
from atoll.core import Core
from atoll.core.access.principals import local
from atoll.model import CreateSandbox

ME = local(os.geteuid(), os.getegid())
REQUEST = "c" * 20


async def test_the_same_request_is_the_same_sandbox(core: Core) -> None:
    spec = CreateSandbox(request_id=REQUEST, labels={"a": "b"})
    first, at_once = await asyncio.gather(core.sandboxes.create(ME, spec), core.sandboxes.create(ME, spec))
    assert first.id == at_once.id == (await core.sandboxes.create(ME, spec)).id
    with pytest.raises(errors.AlreadyExists):
        await core.sandboxes.create(ME, CreateSandbox(request_id=REQUEST))
    other = await core.sandboxes.create(key("other", "use"), spec)
    assert other.id != first.id, "the ids of one owner mean nothing to another"
    await core.sandboxes.destroy(ME, first.id)
    again = await core.sandboxes.create(ME, spec)
    assert (again.id, again.state) == (first.id, "ended"), "it was made, and what became of it is told"


async def test_a_request_that_nobody_waits_for_leaves_nothing_and_can_be_made_again(core: Core) -> None:
    spec = CreateSandbox(request_id=REQUEST)
    left = asyncio.ensure_future(core.sandboxes.create(ME, spec))
    await asyncio.sleep(0)
    left.cancel()
    stays = await core.sandboxes.create(ME, spec)  # comes while the first is under way, so it is kept for this one
    assert stays.state == "running"
    gone = asyncio.ensure_future(core.sandboxes.create(ME, CreateSandbox(request_id="d" * 20)))
    await asyncio.sleep(0)
    gone.cancel()
    await core.sandboxes.tasks.settle(30)
    made = await core.sandboxes.create(ME, CreateSandbox(request_id="d" * 20))
    assert made.state == "running"
    assert {one.id for one in await core.sandboxes.list(ME)} == {stays.id, made.id}


def test_killing_the_daemon_around_creates_leaves_no_orphan() -> None:
    """Every create either gives a sandbox or leaves none, and none of them ends as outcome_unknown."""
    lab, made, failed = Lab(), [], []
    over = threading.Event()

    def create() -> None:
        while not over.is_set():
            try:
                sandbox = atoll.Sandbox.create(home=lab.home, **SMALL)
                made.append(sandbox.id)
                sandbox.close()
            except errors.AtollError as error:
                failed.append(error)

    try:
        lab.start()
        workers = [threading.Thread(target=create) for _ in range(2)]
        for worker in workers:
            worker.start()
        chance = random.Random(7)
        for _ in range(int(os.environ.get("ATOLL_KILLS", "4"))):
            time.sleep(chance.uniform(0.1, 0.8))
            os.kill(lab.start(), 9)
        until(lambda: made, "a create that nobody disturbs gives a sandbox")
        over.set()
        for worker in workers:
            worker.join()
        assert not [error for error in failed if isinstance(error, errors.OutcomeUnknown)], failed
        living = {info.id for info in atoll.Sandbox.list(home=lab.home)}
        assert living == set(made), (living ^ set(made), failed)
        assert len(set(made)) == len(made) > 0
    finally:
        over.set()
        lab.close()
