"""F2-M4: what one key asks for takes neither the daemon's memory nor the threads others need, nor its loop for long."""

import asyncio
import contextlib
import gc
import gzip
import io
import json
import os
import tarfile
import threading
import time
import zlib
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from lab.daemon import DaemonProcess, Failed, running_daemon, until
from lab.plain_backend import plain_core
from lab.sandboxes import RUNTIMES

from atoll import errors, model
from atoll.accounts import THREADS, Accounts
from atoll.core.access.principals import local
from atoll.core.files import verbs as file_verbs
from atoll.core.workers import MAX_WAITING, Workers
from atoll.core.workspaces import archive, manifest
from atoll.core.workspaces.chunks import ChunkStore
from atoll.loop_turns import LoopTurns
from atoll.server import request

MIB = 1 << 20


def rss(daemon: DaemonProcess, field: str = "VmRSS") -> int:
    assert daemon.process is not None
    for line in Path(f"/proc/{daemon.process.pid}/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) // 1024
    raise AssertionError("the daemon is gone")


@pytest.fixture(scope="module")
def daemon() -> Iterator[DaemonProcess]:
    with running_daemon("[pool]\nfloor = 0\nceiling = 0\n") as made:
        yield made


@pytest.mark.parametrize(
    "unit", ["[],", "{},", "a,", "[[[[[[[[", "? ", "- - - ", "&a b, ", "{a: {a: {a: {a: {a: {a: {a: "]
)
def test_a_manifest_is_refused_before_anything_is_made_of_it(daemon: DaemonProcess, unit: str) -> None:
    before = rss(daemon, "VmHWM")
    text = "entries: [" + unit * (5 * MIB // len(unit)) + "]\n"
    with pytest.raises(Failed) as refused:
        daemon.post("/v1/manifests", {"manifest": text})
    assert refused.value.code in ("too_large", "invalid_argument")
    assert rss(daemon, "VmHWM") - before < 96


def test_a_manifest_of_a_thousand_entries_and_a_large_file_is_read() -> None:
    entries = "".join(f"  - file: {{path: f{n}, content: x, mode: '0644'}}\n" for n in range(998))
    big = f"  - file:\n      path: big\n      content: {'y' * (4 * MIB)}\n  - dir: {{path: d}}\n"
    steps = manifest.parse("entries:\n" + entries + big)
    assert len(steps) == 1000 and len(steps[-2].content) == 4 * MIB


def test_a_large_request_of_many_values_is_refused_and_a_long_text_is_not(daemon: DaemonProcess) -> None:
    before = rss(daemon, "VmHWM")
    many = b'{"argv": [' + b'"aa",' * (8 * MIB // 5) + b'"a"]}'
    with pytest.raises(Failed) as refused:
        daemon.ask("POST", "/v1/sandboxes/none/exec", many)
    assert refused.value.code == "too_large"
    assert rss(daemon, "VmHWM") - before < 64
    request.check_shape(json.dumps({"code": "a,[b," * MIB}).encode(), model.RunSpec)
    with pytest.raises(errors.TooLarge):
        request.check_shape(many, model.ExecSpec)


DEEP = b"[" * 300 + b"]" * 300 + b","


@pytest.mark.parametrize(
    "body",
    [
        b'{"entries": [{"a": [' + DEEP * 60_000 + b"1]}]}",
        b'{"entries": [{"a": [' + DEEP * 1500 + b'1]}], "entries": []}',
        b'{"entries": [{"a": [' + b"[]," * 340_000 + b"1]}]}",
        b'{"entries": [{"a": [' + b'{"a":' * 11_000 + b"1" + b"}" * 11_000 + b"]}]}",
        b"{" + b'"a":1,' * (10 * MIB) + b'"b":1}',
        b'{"entries": [{"a": [' + b'"",' * 190_000 + b'""]}]}',
        b'{"entries": [{"a": [' + b'{"a":1},' * 90_000 + b"1]}]}",
    ],
    ids=["deep", "twice", "short", "deepest", "fields", "strings", "objects"],
)
def test_no_request_takes_the_loop_for_long(body: bytes) -> None:
    """Counted in CPU time: all of them are looked at and decoded, or refused, in one turn of the daemon's loop."""
    begun = time.thread_time()
    with contextlib.suppress(errors.AtollError):
        if len(body) > request.LARGE_JSON:
            request.check_shape(body, model.CreateFromManifest)
        model.decode(model.CreateFromManifest, body)
    took = time.thread_time() - begun
    assert took < 0.3, f"{len(body) / MIB:.1f} MiB took {took:.2f} s of CPU time"


def bomb(packed_mib: float) -> bytes:
    """An archive whose workspace is so many MiB of gzip, and a thousand times as much when it is unpacked."""
    block = zlib.compressobj(9, zlib.DEFLATED, 31)
    member = block.compress(bytes(64 * MIB)) + block.flush()
    count = int(packed_mib * MIB / len(member)) + 1
    info = tarfile.TarInfo("zeros")
    info.size = 64 * MIB * count
    inner = gzip.compress(info.tobuf(tarfile.GNU_FORMAT)) + member * count + gzip.compress(bytes(1024))
    outer = io.BytesIO()
    with tarfile.open(fileobj=outer, mode="w") as made:
        for name, data in (("x/metadata.json", json.dumps({"name": "x"}).encode()), ("x/workspace.tar.gz", inner)):
            head = tarfile.TarInfo(name)
            head.size = len(data)
            made.addfile(head, io.BytesIO(data))
    return outer.getvalue()


def test_an_archive_that_grows_a_thousandfold_is_refused(tmp_path: Path) -> None:
    (tmp_path / "bomb").write_bytes(bomb(1.5))
    chunks = ChunkStore(tmp_path / "chunks")
    with pytest.raises(errors.TooLarge, match="256 times"):
        archive.bring_in(chunks, tmp_path / "bomb")


def test_our_own_archive_of_zeros_comes_back(tmp_path: Path) -> None:
    chunks = ChunkStore(tmp_path / "chunks")
    (tmp_path / "zeros.tar").write_bytes(b"")
    zeros = io.BytesIO()
    with tarfile.open(fileobj=zeros, mode="w") as made:
        info = tarfile.TarInfo("zeros")
        info.size = 200 * MIB
        made.addfile(info, io.BytesIO(bytes(info.size)))
    zeros.seek(0)
    entries = archive.read_members(chunks, zeros.read)
    head: dict[str, Any] = {"name": "z", "created_at": 0.0, "sandbox_id": "", "tenant": "", "image": "", "full": False}
    archive.export(chunks, {**head, "size_bytes": 200 * MIB, "file_count": 1}, entries, tmp_path / "out")
    assert [entry.size for entry in archive.bring_in(chunks, tmp_path / "out")[1]] == [200 * MIB]


async def test_nobody_waits_for_anothers_threads() -> None:
    """One owner's work fills its own share, more of it waits, too much of it is refused; another's runs at once."""
    books = Accounts({"owner": {THREADS: 2}, "total": {THREADS: 8}})
    workers, gate = Workers(books), threading.Event()
    try:
        flood = [asyncio.create_task(workers.run("key:a", gate.wait)) for _ in range(2 + MAX_WAITING)]
        await asyncio.sleep(0)
        with pytest.raises(errors.Exhausted):
            await workers.run("key:a", gate.wait)
        assert await workers.run("key:b", lambda: "done") == "done"
        assert books.held(THREADS) == 2
        flood.pop().cancel()
        flood.pop(0).cancel()  # its thread goes on, and so does its place
        await asyncio.sleep(0)
        assert books.held(THREADS) == 2
        gate.set()
        assert all(await asyncio.gather(*flood))
        async with asyncio.timeout(30):
            while books.snapshot():
                await asyncio.sleep(0.01)
        assert not workers._waiting
    finally:
        gate.set()
        workers.close()


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_a_search_is_bounded_and_says_so(daemon: DaemonProcess, runtime: str) -> None:
    box = daemon.create(runtime=runtime, limits={"memory_mb": 512, "disk_mb": 700})
    made = box.exec(
        ["python3", "-c", "f=open('/workspace/big','w')\nfor i in range(1500): f.write('x'*130000+chr(10))\nf.close()"],
        timeout_ms=300_000,
    )
    assert made["exit_code"] == 0, made
    before = rss(daemon)
    found = box.files("grep", path="/workspace/big", pattern="x", max_matches=1_000_000, max_line_bytes=MIB)
    assert found["truncated"] and 0 < len(found["matches"]) < 1500
    assert rss(daemon, "VmHWM") - before < 220
    box.destroy()
    until(lambda: daemon.get("/v1/accounts") == {"accounts": {}}, "all accounts are zero")


async def test_a_list_of_many_files_leaves_the_loop_to_others(tmp_path: Path) -> None:
    """Counted in the loop's own CPU time, which no other program's load changes: no turn of it takes long."""
    count = 40_000
    for number in range(count):
        (tmp_path / f"{'n' * 40}{number}").touch()
    async with plain_core() as core:
        who = local(os.geteuid(), os.getegid())
        made = await core.sandboxes.create(who, model.CreateSandbox(network=False))
        sent, turns, over = list[bytes](), [time.thread_time()], asyncio.Event()

        async def tick() -> None:
            while not over.is_set():
                turns.append(time.thread_time())
                await asyncio.sleep(0)

        async def send(message: dict[str, Any]) -> None:
            sent.append(message.get("body", b""))

        scope: dict[str, Any] = {"state": {}, "headers": [], "query_string": b""}
        exchange = request.Exchange(scope, send, send, who, [])  # type: ignore[arg-type]  # nothing is received
        gc.disable()
        ticking = asyncio.create_task(tick())
        wish = model.ListFiles(path=str(tmp_path), recursive=True, limit=1_000_000)
        found = await core.files.list(who, made.id, wish)
        await exchange.answer_list(found, "entries")
        over.set()
        await ticking
        gc.enable()
        longest = max(b - a for a, b in pairwise(turns))
        told = json.loads(b"".join(sent))
        assert told["count"] == len(told["entries"]) == count and not told["truncated"]
        assert longest < 0.1, f"one turn of the loop took {longest:.3f} s of CPU time"
        await core.sandboxes.destroy(who, made.id)
        assert core.accounts.snapshot() == {}


async def test_many_lists_at_once_cost_a_round_of_the_loop_as_much_as_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Count the entries that are made for answers between two rounds of the loop, whoever else uses the machine."""
    lists, count = 12, 3000
    for number in range(count):
        (tmp_path / f"{number}").touch()
    made, rounds, over = [0], list[int](), asyncio.Event()

    def counted(value: Any) -> dict[str, Any]:
        made[0] += 1
        return clean(value)

    clean = file_verbs.clean
    monkeypatch.setattr(file_verbs, "clean", counted)

    async def tick() -> None:
        while not over.is_set():
            rounds.append(made[0])
            await asyncio.sleep(0)

    async with plain_core() as core:
        who = local(os.geteuid(), os.getegid())
        boxes = [await core.sandboxes.create(who, model.CreateSandbox(network=False)) for _ in range(lists)]
        wish = model.ListFiles(path=str(tmp_path), recursive=True)
        ticking = asyncio.create_task(tick())
        found = await asyncio.gather(*(core.files.list(who, box.id, wish) for box in boxes))
        over.set()
        await ticking
        assert [len(one["entries"]) for one in found] == [count] * lists
        assert max(b - a for a, b in pairwise(rounds)) <= 2 * file_verbs.PART
        for box in boxes:
            await core.sandboxes.destroy(who, box.id)
        assert core.accounts.snapshot() == {}


async def test_owners_take_turns_however_much_one_of_them_asks() -> None:
    turns, order = LoopTurns(), list[str]()

    async def ask(owner: str, pieces: int) -> None:
        for _ in range(pieces):
            await turns.turn(owner)
            order.append(owner)

    await asyncio.gather(*(ask("a", 10) for _ in range(8)), ask("b", 10))
    assert len(order) == 90
    assert max(index for index, owner in enumerate(order) if owner == "b") <= 21


async def test_who_leaves_before_its_turn_is_passed_over() -> None:
    turns = LoopTurns()
    waiting = [asyncio.create_task(turns.turn("a")) for _ in range(50)]
    await asyncio.sleep(0)
    for task in waiting[:-1]:
        task.cancel()
    async with asyncio.timeout(30):
        await waiting[-1]
        await turns.turn("b")
