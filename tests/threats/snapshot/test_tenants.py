"""CTL-01 for snapshots: content is kept once, and nobody learns by that whether somebody else keeps the same bytes."""

import io
import json
import tarfile
from collections.abc import AsyncIterator

import pytest
from lab.plain_backend import plain_core

from atoll import errors
from atoll.core import Core
from atoll.core.access.credentials import NOBODY, KeyHolder

SECRET = b"pin=4711\n"  # little enough to be guessed, one snapshot a guess


def tenant(name: str) -> KeyHolder:
    return KeyHolder(f"key:{name}", NOBODY, NOBODY, "key", name, name, ("use",), {})


async def archive(content: bytes) -> AsyncIterator[bytes]:
    """What `export` would have written, with this one file in it."""
    inner, outer = io.BytesIO(), io.BytesIO()
    with tarfile.open(fileobj=inner, mode="w:gz") as packed:
        info = tarfile.TarInfo("file")
        info.size = len(content)
        packed.addfile(info, io.BytesIO(content))
    with tarfile.open(fileobj=outer, mode="w") as packed:
        for name, data in (("n/metadata.json", json.dumps({}).encode()), ("n/workspace.tar.gz", inner.getvalue())):
            info = tarfile.TarInfo(name)
            info.size = len(data)
            packed.addfile(info, io.BytesIO(data))
    yield outer.getvalue()


async def guess(core: Core, who: KeyHolder, content: bytes) -> int:
    """What a tenant sees of a snapshot with this content: how much room it gives back when it goes."""
    await core.snapshots.bring_in(who, "guess", archive(content), False)
    return await core.snapshots.delete(who, "guess")


async def test_a_guess_is_answered_alike_whoever_has_the_bytes() -> None:
    """The right guess and a wrong one take and free the same; one's own copy is what makes a difference."""
    async with plain_core() as core:
        victim, other = tenant("victim"), tenant("other")
        await core.snapshots.bring_in(victim, "kept", archive(SECRET), False)
        right, wrong = await guess(core, other, SECRET), await guess(core, other, b"pin=0815\n")
        assert right == wrong > 0
        assert await guess(core, victim, SECRET) == 0  # control: what is kept once more is not freed
        (digest,) = await core.snapshots.get_manifest(victim, "kept")  # and its name alone gives nothing
        await core.snapshots.put_manifest(other, "stolen", [digest])
        with pytest.raises(errors.NotFound):
            await core.snapshots.restore(other, "stolen")
        await core.snapshots.delete(other, "stolen")
        await core.snapshots.delete(victim, "kept")
        assert await core.snapshots.names(other) == [] and await guess(core, other, SECRET) == right


async def test_one_tenants_deletions_leave_the_others_content() -> None:
    async with plain_core() as core:
        first, second = tenant("first"), tenant("second")
        for who in (first, second):
            await core.snapshots.bring_in(who, "same", archive(SECRET), False)
        await core.snapshots.delete(first, "same")
        assert (await core.snapshots.inspect(second, "same")).missing_chunks == 0
