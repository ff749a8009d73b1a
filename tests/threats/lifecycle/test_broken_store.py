"""F2-H5: a store that cannot be used keeps no sandbox from ending, and what was not recorded is recorded later."""

import os
import sqlite3
from typing import Any

import pytest
from lab.plain_backend import plain_core

from atoll.core import Core
from atoll.core.access.principals import local
from atoll.core.store.sqlite import StoreFailed
from atoll.model import CreateSandbox

ME = local(os.geteuid(), os.getegid())


class Broken:
    """A connection of which every use fails, as that of a damaged file does."""

    in_transaction = False

    def execute(self, *_: Any) -> None:
        raise StoreFailed(sqlite3.DatabaseError("database disk image is malformed"))


async def test_destroy_stop_and_deadlines_work_without_the_store() -> None:
    async with plain_core() as core:
        made = [await core.sandboxes.create(ME, CreateSandbox(name=f"box{n}")) for n in range(3)]
        boxes = [core.sandboxes.live[ME.owner, one.id].box for one in made]
        real, core.store._db = core.store._db, Broken()  # type: ignore[assignment]
        try:
            ended = await core.sandboxes.destroy(ME, "box0")
            assert ended.state == "ended" and "store" in (ended.unrecorded or [])
            stopped = await core.sandboxes.stop(ME, made[1].id)
            assert stopped.state == "stopped" and "store" in (stopped.unrecorded or [])
            core.sandboxes.live[ME.owner, made[2].id].expires_at = 1.0
            await core.reaper.reap()
            assert not core.sandboxes.live, "nothing runs any more"
            for box in boxes:
                await box.wait()
            with pytest.raises(StoreFailed):
                await core.sandboxes.create(ME, CreateSandbox())
        finally:
            core.store._db = real
        await core.reaper.reap()
        assert await _states(core, made) == ["ended", "stopped", "ended"]
        assert (await core.sandboxes.get(ME, made[2].id)).end.kind == "expired"  # type: ignore[union-attr]
        assert not (await core.sandboxes.get(ME, made[0].id)).unrecorded


async def _states(core: Core, made: list[Any]) -> list[str]:
    return [(await core.sandboxes.get(ME, one.id)).state for one in made]
