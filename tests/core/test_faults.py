"""Faults made on purpose, on boxes that are plain processes: half-made sandboxes, callers that leave, quota races."""

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from lab.plain_backend import PlainBackend, plain_core
from lab.waiting import eventually

from atoll import errors
from atoll.backends.contract import Capabilities
from atoll.config import Config, Sandboxes
from atoll.core import Core
from atoll.core.access.principals import Principal, local, peer
from atoll.model import Chunk, CreateSandbox, ExecSpec, Mount, RunSpec, Started, StatFile

HERE = CreateSandbox(workdir="/tmp")


@pytest.fixture(autouse=True)
async def bounded() -> Any:
    async with asyncio.timeout(120):
        yield


@pytest.mark.parametrize("step", ["create", "agent"])
async def test_a_create_that_fails_leaves_nothing(plain: Core, who: Principal, step: str) -> None:
    backend = plain.backend
    assert isinstance(backend, PlainBackend)
    backend.fail_at = step
    with pytest.raises(errors.AtollError):
        await plain.sandboxes.create(who, CreateSandbox(name="taken", workdir="/tmp"))
    assert plain.store.living() == [] and plain.sandboxes.live == {}
    assert backend.destroyed and list((plain.home / "boxes").iterdir()) == []
    backend.fail_at = ""
    made = await plain.sandboxes.create(who, CreateSandbox(name="taken", workdir="/tmp"))
    assert made.state == "running"


async def test_what_the_runtime_cannot_do_is_refused_before_anything_is_made(plain: Core, who: Principal) -> None:
    """By its capabilities, with the runtime's name and a hint; the backend is not asked to make anything."""
    backend = plain.backend
    assert isinstance(backend, PlainBackend)
    mount = Mount(source="/no/such/source", target="/x", read_only=True)
    with pytest.raises(errors.Unsupported) as refused:
        await plain.sandboxes.create(who, CreateSandbox(workdir="/tmp", mounts=[mount]))
    assert "container mounts no directories" in refused.value.message and refused.value.hint
    parent = await plain.sandboxes.create(who, HERE)
    with pytest.raises(errors.Unsupported, match="shares no workspace"):
        await plain.subagents.create(who, parent.id)
    backend.network_works = True
    for wish in ({"hosts": ["a.example"]}, {"host_ports": [8000]}):
        with pytest.raises(errors.Unsupported, match="the runtime container"):
            await plain.sandboxes.create(who, CreateSandbox(workdir="/tmp", **wish))
    plainly = await plain.sandboxes.create(who, HERE)  # the default list gives way
    assert plainly.policy["network"] == "none" and plainly.policy["enforced"] is False
    assert [row["id"] for row in plain.store.living()] == [parent.id, plainly.id]


async def test_where_no_disk_is_kept_stop_is_refused_and_a_fault_is_the_end(plain: Core, who: Principal) -> None:
    """Nobody loses files by a verb that promises to keep them."""
    backend = plain.backend
    assert isinstance(backend, PlainBackend)
    backend.can = Capabilities(keeps_disk=False)
    with pytest.raises(errors.Unsupported, match="keeps no files"):
        await plain.sandboxes.create(who, CreateSandbox(workdir="/tmp", persistent=True))
    made = await plain.sandboxes.create(who, CreateSandbox(workdir="/tmp", keep=True))
    with pytest.raises(errors.Unsupported, match="keeps no files"):
        await plain.sandboxes.stop(who, made.id)
    assert (await plain.sandboxes.get(who, made.id)).state == "running"
    await plain.sandboxes.retire(made.id, "oom", "out of memory")
    assert (await plain.sandboxes.get(who, made.id)).state == "ended"


async def test_a_half_made_sandbox_is_not_seen(plain: Core, who: Principal) -> None:
    backend = plain.backend
    assert isinstance(backend, PlainBackend)
    backend.gate = asyncio.Event()
    making = asyncio.create_task(plain.sandboxes.create(who, CreateSandbox(name="early", workdir="/tmp")))
    while not plain.store.living():
        await asyncio.sleep(0.01)
    with pytest.raises(errors.NotFound):
        await plain.sandboxes.get(who, "early")
    backend.gate.set()
    assert (await making).name == "early"


async def test_a_caller_who_leaves_during_create_leaves_no_sandbox(plain: Core, who: Principal) -> None:
    backend = plain.backend
    assert isinstance(backend, PlainBackend)
    backend.gate = asyncio.Event()
    making = asyncio.create_task(plain.sandboxes.create(who, HERE))
    while not plain.store.living():
        await asyncio.sleep(0.01)
    making.cancel()
    with pytest.raises(asyncio.CancelledError):
        await making
    backend.gate.set()
    while plain.store.living():
        await asyncio.sleep(0.01)
    (ended,) = await plain.sandboxes.list(who, state="ended")
    assert ended.end is not None and "went away" in ended.end.detail


async def test_never_more_than_the_limit(who: Principal) -> None:
    async with plain_core(Config(sandboxes=Sandboxes(max_count=3))) as core:
        made = await asyncio.gather(*(core.sandboxes.create(who, HERE) for _ in range(12)), return_exceptions=True)
        assert sum(isinstance(one, errors.Exhausted) for one in made) == 9
        assert core.store.count_live() == 3
        for row in core.store.living():
            await core.sandboxes.destroy(who, row["id"])
        assert (await core.sandboxes.create(who, HERE)).state == "running"


async def test_two_principals_cannot_see_each_other(plain: Core, who: Principal) -> None:
    other = local(4242, 4242)
    mine = await plain.sandboxes.create(who, CreateSandbox(name="same", alias="a", workdir="/tmp"))
    theirs = await plain.sandboxes.create(other, CreateSandbox(name="same", alias="a", workdir="/tmp"))
    ran = await plain.commands.exec(who, mine.id, ExecSpec(argv=["true"]))
    verbs: list[Any] = []
    for ref in (mine.id, "unknown" * 3):
        verbs += [
            plain.sandboxes.get(other, ref),
            plain.sandboxes.destroy(other, ref),
            plain.sandboxes.stop(other, ref),
            plain.sandboxes.start(other, ref),
            plain.sandboxes.pause(other, ref),
            plain.commands.exec(other, ref, ExecSpec(argv=["true"])),
            plain.commands.background(other, ref, RunSpec(code="true")),
            plain.commands.poll(other, ref, ran.command_id),
            plain.commands.kill(other, ref, ran.command_id),
            plain.commands.list(other, ref),
            plain.commands.processes(other, ref),
            plain.files.ask(other, ref, "stat", StatFile(path="/")),
        ]
    for verb in verbs:
        with pytest.raises(errors.NotFound) as caught:
            await verb
        assert type(caught.value) is errors.NotFound
    assert [s.id for s in await plain.sandboxes.list(other, state="all")] == [theirs.id]
    assert (await plain.sandboxes.get(other, "same")).id == (await plain.sandboxes.get(other, "a")).id == theirs.id
    assert {e["sandbox_id"] for e in plain.history.events(other.owner, None, 100, None)} == {theirs.id}


async def test_peers_of_other_users_are_refused(tmp_path: Path) -> None:
    import socket

    left, right = socket.socketpair(socket.AF_UNIX)
    with left, right:
        assert peer(left).uid == os.geteuid()
        with pytest.raises(errors.PermissionDenied):
            peer(left, frozenset((os.geteuid() + 1,)))


async def test_a_lost_channel_loses_no_output(plain: Core, who: Principal) -> None:
    made = await plain.sandboxes.create(who, HERE)
    live = plain.sandboxes.live[who.owner, made.id]
    spec = ExecSpec(command="for i in $(seq 1 300); do echo line $i; sleep 0.005; done; exit 4")
    got, cuts = b"", 0
    async for item in plain.commands.stream(who, made.id, spec):
        if isinstance(item, Chunk):
            got += item.data
            if len(got) > 500 * (cuts + 1) and cuts < 4:
                cuts += 1
                live.client.drop_connection()
        elif not isinstance(item, Started):
            assert item.exit_code == 4 and item.stdout.encode() == got and not item.truncated
    assert got == b"".join(b"line %d\n" % n for n in range(1, 301)) and cuts == 4
    assert live.client.connections == 5


async def test_a_cancelled_caller_kills_and_the_end_is_recorded(plain: Core, who: Principal) -> None:
    made = await plain.sandboxes.create(who, HERE)
    running = asyncio.create_task(
        plain.commands.exec(who, made.id, ExecSpec(command="sleep 999", id="x", timeout_ms=0))
    )
    while not plain.store.command(made.id, "x"):
        await asyncio.sleep(0.01)
    live = plain.sandboxes.live[who.owner, made.id]
    while live.commands["x"].pid is None:
        await asyncio.sleep(0.01)
    pid = live.commands["x"].pid
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    await live.commands["x"].done.wait()
    assert (await plain.commands.poll(who, made.id, "x")).status == "cancelled"
    assert pid is not None and not Path(f"/proc/{pid}").exists()


async def test_a_box_that_dies_ends_its_commands_with_the_reason(plain: Core, who: Principal) -> None:
    made = await plain.sandboxes.create(who, HERE)
    running = asyncio.create_task(
        plain.commands.exec(who, made.id, ExecSpec(command="sleep 999", id="x", timeout_ms=0))
    )
    live = plain.sandboxes.live[who.owner, made.id]
    while "x" not in live.commands or live.commands["x"].pid is None:
        await asyncio.sleep(0.01)
    pid = live.commands["x"].pid
    os.kill(live.box.record["pid"], signal.SIGKILL)
    with pytest.raises(errors.SandboxGone) as caught:
        await running
    assert caught.value.details["reason"] == "crashed"
    while (await plain.sandboxes.get(who, made.id)).state != "ended":
        await asyncio.sleep(0.01)
    await eventually(lambda: not Path(f"/proc/{pid}").exists(), "its command is gone")


async def test_a_persistent_sandbox_is_put_to_rest_instead_of_destroyed(plain: Core, who: Principal) -> None:
    made = await plain.sandboxes.create(who, CreateSandbox(persistent=True, idle_timeout_s=0.2, workdir="/tmp"))
    while (await plain.sandboxes.get(who, made.id)).state != "stopped":
        await asyncio.sleep(0.02)
    info = await plain.sandboxes.get(who, made.id)
    assert info.end is not None and info.end.kind == "idle"


async def test_a_slow_reader_slows_only_its_own_command(plain: Core, who: Principal) -> None:
    made = await plain.sandboxes.create(who, HERE)
    stream = plain.commands.stream(who, made.id, ExecSpec(command="yes | head -c 20000000", timeout_ms=0))
    await anext(stream)
    await anext(stream)  # and then nobody reads
    for number in range(20):
        assert (await plain.commands.exec(who, made.id, ExecSpec(command=f"echo {number}"))).stdout == f"{number}\n"
    total = 0
    async for item in stream:
        total += len(item.data) if isinstance(item, Chunk) else 0
    assert total > 19_000_000
