"""The client against an agent that misbehaves: wrong secrets, broken frames, floods, cut connections."""

import asyncio
import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
from lab.scripted_agent import Peer, ScriptedAgent

from atoll import errors
from atoll.guest import Process, ProgramNotStarted, wire

EXIT = {"code": 0, "signal": None, "timed_out": False, "cancelled": False, "oom": False, "wall_ms": 1}


@pytest.fixture(autouse=True)
async def bounded() -> Any:
    async with asyncio.timeout(60):
        yield


async def test_a_request_is_answered_and_errors_keep_their_class(tmp_path: Path) -> None:
    async def script(peer: Peer, stream: int, request: dict[str, Any]) -> None:
        if request["op"] == "stat":
            peer.ok(stream, stat={"size": 3})
        else:
            peer.err(stream, request["code"], errno=28)

    async with ScriptedAgent(tmp_path / "a.sock", script) as agent:
        client = agent.client()
        assert await client.request("stat", path="/x") == {"stat": {"size": 3}}
        for code, cls in {
            "file_not_found": errors.FileNotFound,
            "disk_full": errors.DiskFull,
            "name_too_long": errors.FileError,
            "bad_pattern": errors.InvalidArgument,
            "no such code": errors.Internal,
        }.items():
            with pytest.raises(cls) as caught:
                await client.request("mkdir", code=code)
            assert caught.value.details["errno"] == 28
        with pytest.raises(ProgramNotStarted):
            await client.request("exec", code="program_not_found")
        await client.close()


async def test_the_writer_that_dialled_lives_as_long_as_its_connection(tmp_path: Path) -> None:
    async def script(peer: Peer, stream: int, request: dict[str, Any]) -> None:
        peer.ok(stream)

    async with ScriptedAgent(tmp_path / "a.sock", script) as agent:
        client, dial, writers = agent.client(), agent.client()._dial, []

        async def remembered() -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
            reader, writer = await dial()
            writers.append(weakref.ref(writer))
            return reader, writer

        client._dial = remembered
        await client.request("stat", path="/x")
        gc.collect()
        assert len(writers) == 1 and writers[0]() is not None  # else newer Pythons close the socket under us
        await client.close()


async def test_an_impostor_is_refused(tmp_path: Path) -> None:
    async def script(peer: Peer, stream: int, request: dict[str, Any]) -> None:
        peer.ok(stream)

    async with ScriptedAgent(tmp_path / "a.sock", script, secret="3" * 32) as agent:
        with pytest.raises(errors.Internal, match="not this sandbox"):
            await agent.client().request("info")


async def test_output_is_byte_exact_and_bounded_by_credit(tmp_path: Path) -> None:
    blob = bytes(range(256)) * 20_000

    async def script(peer: Peer, stream: int, request: dict[str, Any]) -> None:
        peer.event(stream, started={"pid": 7})
        await peer.data(stream, wire.STDOUT, blob)
        await peer.data(stream, wire.STDERR, b"oops")
        peer.ok(stream, exit=EXIT, out=len(blob), err=4)

    async with ScriptedAgent(tmp_path / "a.sock", script) as agent:
        client = agent.client()
        process = await Process.start(client, "c1", {"argv": ["x"]})
        await agent.peers[0].until(lambda: agent.peers[0].credit.get((1, 1)) == 0)  # stalls: nobody has read yet
        got: dict[int, bytearray] = {1: bytearray(), 2: bytearray()}
        async for channel, data in process:
            got[channel] += data
        assert got[1] == blob and got[2] == b"oops"
        assert process.exit is not None and process.exit.code == 0 and process.exit.out == len(blob)
        await client.close()


async def test_data_beyond_the_credit_cuts_the_connection(tmp_path: Path) -> None:
    async def script(peer: Peer, stream: int, request: dict[str, Any]) -> None:
        for _ in range(5):
            peer.writer.write(wire.data_head(stream, 1, wire.MAX_DATA) + b"x" * wire.MAX_DATA)
        await peer.until(lambda: False)

    async with ScriptedAgent(tmp_path / "a.sock", script) as agent:
        client = agent.client()
        download = await client.download("read", path="/x")
        connection = await client.connection()
        await connection.closed
        with pytest.raises(errors.Unavailable, match="credit"):
            async for _ in download:
                pass
        download.close()
        await client.close()


@pytest.mark.parametrize("garbage", [b"\xff" * 9, wire.head(0, 1, 42), wire.head(3, 1, wire.RESULT) + b"\xc1\xc1\xc1"])
async def test_garbage_ends_the_connection_and_the_next_one_works(tmp_path: Path, garbage: bytes) -> None:
    async def script(peer: Peer, stream: int, request: dict[str, Any]) -> None:
        if len(agent.peers) == 1:
            peer.writer.write(garbage)
        else:
            peer.ok(stream, fine=True)

    async with ScriptedAgent(tmp_path / "a.sock", script) as agent:
        client = agent.client()
        assert await client.request("stat", path="/x") == {"fine": True}  # read-only: asked again by itself
        assert client.connections == 2
        await client.close()


async def test_a_lost_answer_of_a_change_is_outcome_unknown(tmp_path: Path) -> None:
    async def script(peer: Peer, stream: int, request: dict[str, Any]) -> None:
        peer.writer.close()

    async with ScriptedAgent(tmp_path / "a.sock", script) as agent:
        client = agent.client()
        with pytest.raises(errors.OutcomeUnknown):
            await client.request("remove", path="/x")
        await client.close()


async def test_a_process_is_read_on_after_the_channel_broke(tmp_path: Path) -> None:
    asked: list[dict[str, Any]] = []

    async def script(peer: Peer, stream: int, request: dict[str, Any]) -> None:
        asked.append(request)
        if request["op"] == "exec":
            peer.event(stream, started={"pid": 7})
            await peer.data(stream, wire.STDOUT, b"hello ")
            await peer.writer.drain()
            peer.writer.close()
        else:
            peer.event(stream, attached={"pid": 7, "out": request["out"], "err": request["err"]})
            await peer.data(stream, wire.STDOUT, b"hello world"[request["out"] :])
            peer.ok(stream, exit=EXIT, out=11, err=0)

    async with ScriptedAgent(tmp_path / "a.sock", script) as agent:
        client = agent.client()
        process = await Process.start(client, "c1", {"argv": ["x"]})
        assert b"".join([data async for _, data in process]) == b"hello world"
        assert [r["op"] for r in asked] == ["exec", "attach"]
        await client.close()


async def test_a_command_that_never_started_is_unavailable_not_unknown(tmp_path: Path) -> None:
    async def script(peer: Peer, stream: int, request: dict[str, Any]) -> None:
        if request["op"] == "exec":
            peer.writer.close()
        else:
            peer.err(stream, "not_found")

    async with ScriptedAgent(tmp_path / "a.sock", script) as agent:
        client = agent.client()
        with pytest.raises(errors.Unavailable):
            await Process.start(client, "c1", {"argv": ["x"]})
        await client.close()


async def test_an_upload_follows_credit_and_a_cut_source_cancels_it(tmp_path: Path) -> None:
    async def script(peer: Peer, stream: int, request: dict[str, Any]) -> None:
        peer.event(stream, ready=True)
        peer.writer.write(wire.credit(stream, 0, 1000))
        await peer.until(lambda: len(peer.uploads.get(stream, b"")) == 1000)
        if request["path"] == "/full":
            peer.err(stream, "disk_full", errno=28)
            return
        peer.writer.write(wire.credit(stream, 0, 1 << 20))
        await peer.until(lambda: stream in peer.ended or stream in peer.cancelled)
        if stream in peer.cancelled:
            peer.err(stream, "cancelled")
        else:
            peer.ok(stream, bytes=len(peer.uploads[stream]))

    async def broken() -> Any:
        yield b"y" * 5000
        raise RuntimeError("the caller went away")

    async with ScriptedAgent(tmp_path / "a.sock", script) as agent:
        client = agent.client()
        assert await client.upload("write", b"x" * 5000, path="/a") == {"bytes": 5000}
        with pytest.raises(errors.DiskFull):
            await client.upload("write", b"x" * 5000, path="/full")
        with pytest.raises(RuntimeError):
            await client.upload("write", broken(), path="/b")
        await agent.peers[0].until(lambda: bool(agent.peers[0].cancelled))
        await client.close()


async def test_closing_gives_everybody_the_reason(tmp_path: Path) -> None:
    async def script(peer: Peer, stream: int, request: dict[str, Any]) -> None:
        peer.event(stream, started={"pid": 7})
        await peer.until(lambda: False)

    async with ScriptedAgent(tmp_path / "a.sock", script) as agent:
        client = agent.client()
        process = await Process.start(client, "c1", {"argv": ["x"]})

        async def read() -> None:
            async for _ in process:
                pass

        reader = asyncio.create_task(read())
        await asyncio.sleep(0)
        await client.close(errors.SandboxGone("it has ended", details={"reason": "oom"}))
        with pytest.raises(errors.SandboxGone):
            await reader
        with pytest.raises(errors.SandboxGone):
            await client.request("info")


async def test_a_flood_of_events_ends_only_its_own_operation(tmp_path: Path) -> None:
    async def script(peer: Peer, stream: int, request: dict[str, Any]) -> None:
        if request["op"] != "watch":
            peer.ok(stream)
            return
        for _ in range(12):
            peer.event(stream, changes=["x" * 1_000_000])
            await peer.writer.drain()
        await peer.until(lambda: stream in peer.cancelled)
        peer.ok(stream)

    async with ScriptedAgent(tmp_path / "a.sock", script) as agent:
        client = agent.client()
        stream = await client.open("watch", path="/x")
        await agent.peers[0].until(lambda: 1 in agent.peers[0].cancelled)
        with pytest.raises(errors.Exhausted):
            async for _ in stream:
                pass
        await client.request("info")
        await client.close()


async def test_what_the_ring_lost_is_counted(tmp_path: Path) -> None:
    async def script(peer: Peer, stream: int, request: dict[str, Any]) -> None:
        peer.event(stream, attached={"pid": 7, "out": 100, "err": 0})
        await peer.data(stream, wire.STDOUT, b"abc")
        peer.event(stream, gap={"ch": 1, "from": 103, "to": 203})
        await peer.data(stream, wire.STDOUT, b"def")
        peer.ok(stream, exit=EXIT, out=206, err=0)

    async with ScriptedAgent(tmp_path / "a.sock", script) as agent:
        client = agent.client()
        process = await Process.attach(client, "c1", out=40)
        assert [data async for _, data in process] == [b"abc", b"def"]
        assert process.missed[1] == 160 and process.offsets[1] == 206
        await client.close()


async def test_a_forgotten_command_is_outcome_unknown(tmp_path: Path) -> None:
    async def script(peer: Peer, stream: int, request: dict[str, Any]) -> None:
        if request["op"] == "exec":
            peer.writer.close()
        else:
            peer.err(stream, "gone")

    async with ScriptedAgent(tmp_path / "a.sock", script) as agent:
        client = agent.client()
        with pytest.raises(errors.OutcomeUnknown):
            await Process.start(client, "c1", {"argv": ["x"]})
        await client.close()
