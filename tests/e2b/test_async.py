"""The asynchronous half of the stock Python SDK: every method once, against the same door."""

import asyncio
from typing import Any

import pytest
from e2b import AsyncSandbox, CommandExitException, FilesystemEventType, PtySize, SandboxException, SandboxQuery
from lab.e2b import Door
from lab.sandboxes import ONE_RUNTIME
from lab.waiting import PATIENCE


@pytest.mark.parametrize("runtime", ONE_RUNTIME, indirect=True, scope="module")
async def test_every_method(door: Door) -> None:
    box = await AsyncSandbox.create(timeout=300, metadata={"async": door.key[-8:]}, **door.options)
    try:
        await sandbox_methods(door, box)
        await command_methods(box)
        await terminal_methods(box)
        await file_methods(box)
        assert await box.pause() is True and await box.pause() is False and not await box.is_running()
        await box.connect(timeout=60)
        assert await box.files.read("b") == "two"
    finally:
        assert await box.kill() is True and await box.kill() is False


async def sandbox_methods(door: Door, box: Any) -> None:
    assert await box.is_running()
    await box.set_timeout(600)
    assert (await box.get_info()).template_id == "base"
    assert await box.get_metrics()
    await box.update_network({"deny_out": ["0.0.0.0/0"]})
    pages = AsyncSandbox.list(query=SandboxQuery(metadata={"async": door.key[-8:]}), **door.options)
    assert [one.sandbox_id for one in await pages.next_items()] == [box.sandbox_id]
    assert box.get_host(80) == f"80-{box.sandbox_id}.{box.sandbox_domain}"
    assert "signature" in box.download_url("x") and "signature" in box.upload_url("x")
    with pytest.raises(SandboxException):
        await box.fork()
    made = await box.create_snapshot(mode="filesystem")
    assert [one.snapshot_id for one in await box.list_snapshots().next_items()] == [made.snapshot_id]
    assert await AsyncSandbox.delete_snapshot(made.snapshot_id, **door.options) is True
    same = await AsyncSandbox.connect(box.sandbox_id, **door.options)
    assert (await same.commands.run("echo same")).stdout == "same\n"


async def command_methods(box: Any) -> None:
    async def told(text: str) -> None:
        heard.append(text)

    heard: list[str] = []
    assert (await box.commands.run("echo a; echo b", on_stdout=told)).stdout == "a\nb\n" and "".join(heard) == "a\nb\n"
    running = await box.commands.run("cat", background=True, stdin=True)
    assert running.pid in [one.pid for one in await box.commands.list()]
    other = await box.commands.connect(running.pid)
    await box.commands.send_stdin(running.pid, "one\n")
    async with box.commands.stream_input(running.pid) as typed:
        await typed.send("two\n")
    await box.commands.close_stdin(running.pid)
    assert (await running.wait()).stdout == (await other.wait()).stdout == "one\ntwo\n"
    sleeper = await box.commands.run("sleep 1000", background=True)
    assert await box.commands.kill(sleeper.pid) is True and await box.commands.kill(sleeper.pid) is False
    with pytest.raises(CommandExitException):
        await sleeper.wait()
    many = await asyncio.gather(*(box.commands.run(f"echo {number}") for number in range(10)))
    assert [one.stdout for one in many] == [f"{number}\n" for number in range(10)]


async def terminal_methods(box: Any) -> None:
    heard: list[bytes] = []

    async def hear(data: bytes) -> None:
        heard.append(data)

    terminal = await box.pty.create(PtySize(rows=24, cols=80), on_data=hear)
    await box.pty.resize(terminal.pid, PtySize(rows=40, cols=120))
    async with box.pty.stream_input(terminal.pid) as typed:
        await typed.send(b"stty size\n")
    other = await box.pty.connect(terminal.pid, on_data=hear)
    await box.pty.send_stdin(terminal.pid, b"exit\n")
    await terminal.wait()
    await other.wait()
    assert b"40 120" in b"".join(heard)
    ended = await box.pty.create(PtySize(rows=24, cols=80), on_data=hear)
    assert await box.pty.kill(ended.pid) is True


async def file_methods(box: Any) -> None:
    await box.files.write("a", "one")
    await box.files.write_files([{"path": "b", "data": "two"}, {"path": "c/d", "data": b"three"}])
    assert await box.files.read("a") == "one" and await box.files.read("c/d", format="bytes") == b"three"
    stream = await box.files.read("c/d", format="stream")
    assert b"".join([piece async for piece in stream]) == b"three"
    assert await box.files.exists("a") and (await box.files.get_info("a")).size == 3
    assert await box.files.make_dir("e") is True and await box.files.make_dir("e") is False
    assert (await box.files.rename("a", "e/f")).path == "/home/user/e/f"
    names = [one.name for one in await box.files.list("/home/user") if not one.name.startswith(".")]
    assert names == ["b", "c", "e"]
    seen: asyncio.Queue[Any] = asyncio.Queue()
    watch = await box.files.watch_dir("e", on_event=seen.put_nowait)
    await box.files.write("e/g", "x")
    await box.files.remove("e/g")
    found = []
    async with asyncio.timeout(PATIENCE):
        while (event := await seen.get()).type != FilesystemEventType.REMOVE:
            found.append((event.name, event.type.value))
    assert found == [("g", "create"), ("g", "chmod"), ("g", "write")]
    await watch.stop()
