"""Caps of what stays on the host: disks and audit records of an owner, and what ended sandboxes leave behind."""

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from lab.daemon import DaemonProcess, Failed, running_daemon
from lab.plain_backend import plain_core
from lab.principals import key
from lab.sandboxes import ROOTLESS, RUNTIMES

from atoll import accounts, config, errors, model
from atoll.core.access import audited_verbs
from atoll.core.access.principals import Principal, local
from atoll.core.commands import history
from atoll.core.store import records

ME = local(os.geteuid(), os.getegid())
MIB = 1 << 20
DISKS = "[pool]\nfloor = 0\nceiling = 0\n[accounts.owner]\ndisk_mb = 150\n"


@pytest.fixture(scope="module")
def small_disks() -> Iterator[DaemonProcess]:
    with running_daemon(DISKS) as made:
        yield made


@pytest.mark.skipif(ROOTLESS, reason="an ordinary user's disks are not on the home")
@pytest.mark.parametrize("runtime", RUNTIMES)
def test_disks_of_an_owner_have_a_cap_that_a_restart_keeps(small_disks: DaemonProcess, runtime: str) -> None:
    limits = {"memory_mb": 256, "pids": 128, "disk_mb": 64}
    first, second = (small_disks.create(runtime=runtime, limits=limits) for _ in range(2))
    with pytest.raises(Failed) as full:
        small_disks.create(runtime=runtime, limits=limits)
    assert full.value.code == "exhausted"
    small_disks.kill()
    small_disks.start()
    with pytest.raises(Failed) as still:
        small_disks.create(runtime=runtime, limits=limits)
    assert still.value.code == "exhausted"
    first.destroy()
    small_disks.create(runtime=runtime, limits=limits).destroy()
    second.destroy()
    assert "disk" not in small_disks.get("/v1/accounts")["accounts"].get("total", {})


async def test_audit_records_of_a_key_have_a_cap_for_a_day(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond it the key is refused, others are not, its sandboxes can be ended, and endings of nothing are refused too."""
    flooder, other = key("flooder", "use"), key("other", "use")
    async with plain_core(config.parse("[accounts.owner]\naudit_mb = 1\n")) as core:
        box = await core.sandboxes.create(flooder, model.CreateSandbox(network=False))
        refused = list[type[errors.AtollError]]()
        while errors.Exhausted not in refused:  # each leaves a record
            with pytest.raises(errors.AtollError) as no:
                await core.sandboxes.destroy(flooder, f"none-{len(refused)}")
            refused.append(no.type)
            assert len(refused) < 2048
        with pytest.raises(errors.Exhausted):
            await core.sandboxes.create(flooder, model.CreateSandbox(network=False))
        assert core.accounts.held(accounts.AUDIT, accounts.owner(flooder.owner)) <= MIB
        made = await core.sandboxes.create(other, model.CreateSandbox(network=False))
        await core.sandboxes.destroy(other, made.id)
        ended = await core.sandboxes.destroy(flooder, box.id)
        assert ended.state == "ended"
        with pytest.raises(errors.Exhausted):  # once is enough
            await core.sandboxes.destroy(flooder, box.id)
        now = time.time()
        monkeypatch.setattr(audited_verbs.time, "time", lambda: now + audited_verbs.DAY)
        with pytest.raises(errors.NotFound):
            await core.sandboxes.destroy(flooder, "a-sandbox-that-is-not-there")


async def test_ended_sandboxes_of_an_owner_are_forgotten_beyond_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """The oldest go, with what they left behind; those of others stay."""
    monkeypatch.setattr(records, "MAX_ENDED", 3)
    other = Principal("key:other", 65534, 65534, "key")
    async with plain_core() as core:
        kept = await core.sandboxes.create(other, model.CreateSandbox(network=False))
        await core.sandboxes.destroy(other, kept.id)
        made = []
        for _ in range(5):
            made.append(await core.sandboxes.create(ME, model.CreateSandbox(network=False)))
            await core.sandboxes.destroy(ME, made[-1].id)
        core.history.purge()
        known = [sandbox for _, sandbox in core.store.ended()]
        assert set(known) == {kept.id, *(one.id for one in made[2:])}
        assert not any((core.home / "transcripts" / f"{one.id}.log").exists() for one in made[:2])


async def test_transcripts_of_ended_sandboxes_have_a_cap(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history, "ENDED_BYTES", 100_000)
    async with plain_core() as core:
        made = []
        for _ in range(3):
            made.append(await core.sandboxes.create(ME, model.CreateSandbox(network=False)))
            await core.sandboxes.destroy(ME, made[-1].id)
            _transcript(core.home, made[-1].id).write_bytes(b"0 o c x\n" * 5_000)
        core.history.purge()
        assert [_transcript(core.home, one.id).exists() for one in made] == [False, True, True]


def _transcript(home: Path, sandbox: str) -> Path:
    return home / "transcripts" / f"{sandbox}.log"
