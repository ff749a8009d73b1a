"""F2-H5: a key's quota `disk_mb` is one account of all its sandboxes' disks, stopped ones included, and is given back."""

import asyncio
from typing import Any

import pytest
from lab.principals import key

from atoll import errors
from atoll.core import Core
from atoll.core.access.credentials import KeyHolder
from atoll.model import CreateSandbox, SandboxInfo, convert


def holder(name: str, **quotas: float) -> KeyHolder:
    return KeyHolder(f"key:{name}", 65534, 65534, "key", name, name, ("use",), quotas)


async def create(core: Core, who: Any, disk_mb: int) -> SandboxInfo:
    return await core.sandboxes.create(who, convert(CreateSandbox, {"limits": {"disk_mb": disk_mb}}))


async def test_disks_of_a_key_are_promised_once(core: Core) -> None:
    who = holder("tight", disk_mb=1000)
    with pytest.raises(errors.Exhausted, match="1000 MB of disk at once, 0 are in use"):
        await create(core, who, 1001)
    outcomes = await asyncio.gather(*(create(core, who, 250) for _ in range(20)), return_exceptions=True)
    made = [one for one in outcomes if isinstance(one, SandboxInfo)]
    assert len(made) == 4
    assert all(isinstance(one, errors.Exhausted) for one in outcomes if one not in made)
    await core.sandboxes.stop(who, made[0].id)
    with pytest.raises(errors.Exhausted, match="1000 are in use"):
        await create(core, who, 16)  # what is stopped keeps its disk
    assert (await create(core, key("other", "use"), 250)).id, "another key is not meant"
    await core.sandboxes.destroy(who, made[0].id)
    again = await create(core, who, 250)
    for one in (again, *made[1:]):
        await core.sandboxes.destroy(who, one.id)
    assert (await create(core, who, 1000)).id
