"""REST routes for snapshots, sub-agents and manifests. Imported for its entries in the table of `rest`."""

import asyncio

from atoll import model
from atoll.server import frames
from atoll.server.request import Exchange, flag
from atoll.server.routes import SANDBOX, Rest, route

SNAPSHOT = "/v1/snapshots/{name}"
PIECE = 1 << 20


@route("POST", f"{SANDBOX}/snapshots", "Save its files", verb="snapshots.save", status=201)
async def save(rest: Rest, exchange: Exchange) -> None:
    request = await exchange.json(model.SaveSnapshot)
    work = rest.core.snapshots.save(exchange.who, exchange.ref, request)
    await exchange.answer(await exchange.while_connected(work), 201)


@route("GET", "/v1/snapshots", "Snapshots, oldest first", verb="snapshots.list")
async def list_snapshots(rest: Rest, exchange: Exchange) -> None:
    await exchange.answer({"snapshots": await rest.core.snapshots.list(exchange.who)})


@route("GET", SNAPSHOT, "One snapshot and its files", verb="snapshots.inspect")
async def inspect(rest: Rest, exchange: Exchange) -> None:
    await exchange.answer(await rest.core.snapshots.inspect(exchange.who, exchange.parts[2]))


@route("DELETE", SNAPSHOT, "Delete it, and the content no other snapshot has", verb="snapshots.delete")
async def delete(rest: Rest, exchange: Exchange) -> None:
    freed = await rest.core.snapshots.delete(exchange.who, exchange.parts[2])
    await exchange.answer({"ok": True, "freed_bytes": freed})


@route("POST", f"{SNAPSHOT}/restore", "A new sandbox with its files", verb="snapshots.restore", status=201)
async def restore(rest: Rest, exchange: Exchange) -> None:
    request = await exchange.json(model.RestoreSnapshot)
    work = rest.core.snapshots.restore(exchange.who, exchange.parts[2], request.sandbox)
    await exchange.answer(await exchange.while_connected(work), 201)


@route("GET", f"{SNAPSHOT}/archive", "The snapshot as one file, in K8E's layout", verb="snapshots.export")
async def export(rest: Rest, exchange: Exchange) -> None:
    async def work() -> None:
        async with rest.core.snapshots.export(exchange.who, exchange.parts[2]) as path:
            size = str(path.stat().st_size).encode()
            await exchange.start(200, [(b"content-type", b"application/x-tar"), (b"content-length", size)])
            with await asyncio.to_thread(open, path, "rb") as file:
                while piece := await asyncio.to_thread(file.read, PIECE):
                    await exchange.write(piece)
            await exchange.end()

    await exchange.while_connected(work())


@route(
    "PUT", f"{SNAPSHOT}/archive", "A snapshot from such a file", verb="snapshots.bring_in", query=("force",), status=201
)
async def bring_in(rest: Rest, exchange: Exchange) -> None:
    force = flag(exchange.query("force"), "force")
    found = await rest.core.snapshots.bring_in(exchange.who, exchange.parts[2], exchange.chunks(), force)
    await exchange.answer(found, 201)


@route(
    "POST", f"{SANDBOX}/subagents", "A sandbox beside it, on the same /workspace", verb="subagents.create", status=201
)
async def subagent(rest: Rest, exchange: Exchange) -> None:
    request = await exchange.json(model.SubAgent)
    work = rest.core.subagents.create(exchange.who, exchange.ref, request)
    await exchange.answer(await exchange.while_connected(work), 201)


@route("POST", "/v1/manifests", "A new sandbox filled by a manifest, as a frame stream", verb="manifests.create")
async def manifest(rest: Rest, exchange: Exchange) -> None:
    request = await exchange.json(model.CreateFromManifest)
    await frames.send(exchange, rest.core.manifests.create(exchange.who, request))
