"""REST routes for images and for runs that bring their own sandbox. Imported for its entries in the table of `rest`."""

import asyncio
from typing import Any

from atoll import errors, model
from atoll.core.policy.images import AUTO, StoredImages
from atoll.server import frames
from atoll.server.request import Exchange
from atoll.surfaces.rest.routes import Rest, route


@route("POST", "/v1/run", "A command in a sandbox of its own", verb="run")
async def run_once(rest: Rest, exchange: Exchange) -> None:
    request = await exchange.json(model.RunOnce)
    if frames.wanted(exchange):
        await frames.send(exchange, rest.core.once.stream(exchange.who, request))
    else:
        await exchange.answer(await exchange.while_connected(rest.core.once.run(exchange.who, request)))


@route(
    "GET",
    "/v1/images/detect",
    "The catalog's image for a command; null where it alone means none",
    query=("program",),
    scope="use",
)
async def detect(rest: Rest, exchange: Exchange) -> None:
    program = exchange.query("program").get("program") or ""
    image, is_default = await asyncio.to_thread(_images(rest).detect, program)
    await exchange.answer({"program": program, "image": None if is_default else image})


@route("POST", "/v1/images/detect", "The image for a command in a directory", model.DetectImage, scope="admin")
async def detect_here(rest: Rest, exchange: Exchange) -> None:
    request = await exchange.json(model.DetectImage)
    image, is_default = await asyncio.to_thread(
        _images(rest).detect, request.program, request.runtime, sorted(request.names), request.procfile
    )
    if is_default and request.program:  # for a program nothing knows no image is fetched, which by its name it would be
        image = AUTO
    await exchange.answer({"program": request.program, "image": image})


@route("GET", "/v1/images", "Images on this machine", scope="use")
async def list_images(rest: Rest, exchange: Exchange) -> None:
    images = _images(rest)
    found = await asyncio.to_thread(lambda: [_shown(image.to_json()) for image in images.store.list()])
    catalog = [{"name": entry.name, "oci": entry.oci, "kind": entry.kind} for entry in images.catalog.images]
    answer = {"images": found, "catalog": catalog, "disk_bytes": await asyncio.to_thread(images.store.disk_bytes)}
    await exchange.answer(answer)


@route("GET", "/v1/images/inspect", "One image", query=("name",), scope="use")
async def inspect(rest: Rest, exchange: Exchange) -> None:
    images, name = _images(rest), _name(exchange.query("name"))
    if name == "host":
        await exchange.answer(await asyncio.to_thread(lambda: images.store.host_image().to_json()))
        return
    entry = images.catalog.get(name)
    names = (entry.oci, name) if entry is not None else (name,)
    found = await asyncio.to_thread(lambda: next(filter(None, map(images.store.find, names)), None))
    if found is None:
        raise errors.NotFound(f"no local image {name!r:.120}", hint=f"get it with `atoll image pull {name:.120}`")
    await exchange.answer(found.to_json())


@route("POST", "/v1/images/pull", "Pull an image, telling how far it is", model.PullImage, scope="admin")
async def pull(rest: Rest, exchange: Exchange) -> None:
    request, images = await exchange.json(model.PullImage), _images(rest)
    entry = images.catalog.get(request.name)
    images.allowlist.check(request.name, images.catalog)
    name = entry.oci if entry is not None else request.name
    await frames.send(exchange, images.watch(lambda step: images.store.pull(name, progress=step)))


@route("POST", "/v1/images/build", "Build an image of Debian packages", model.BuildImage, scope="admin")
async def build(rest: Rest, exchange: Exchange) -> None:
    request, images = await exchange.json(model.BuildImage), _images(rest)
    work = images.watch(lambda step: images.store.build_debian(request.name, request.debian, step))
    await frames.send(exchange, work)


@route(
    "POST",
    "/v1/images/remove",
    "Remove an image's name, and the image with its last name",
    model.PullImage,
    scope="admin",
)
async def remove(rest: Rest, exchange: Exchange) -> None:
    request, images = await exchange.json(model.PullImage), _images(rest)
    entry = images.catalog.get(request.name)
    name = entry.oci if entry is not None and images.store.find(entry.oci) is not None else request.name
    freed = await asyncio.to_thread(images.store.remove, name, _in_use(rest))
    await exchange.answer({"removed": name, "bytes": freed})


@route("POST", "/v1/images/prune", "Remove what no name and no sandbox needs", scope="admin")
async def prune(rest: Rest, exchange: Exchange) -> None:
    await exchange.json(model.Request)
    pruned = await asyncio.to_thread(_images(rest).store.prune, _in_use(rest))
    await exchange.answer({"images": list(pruned.images), "layers": pruned.layers, "bytes": pruned.bytes})


def _images(rest: Rest) -> StoredImages:
    if not isinstance(rest.core.images, StoredImages):
        raise errors.Unsupported("this daemon has no image store")
    return rest.core.images


def _in_use(rest: Rest) -> frozenset[str]:
    """Digests of the images that living and stopped sandboxes of every owner are made of."""
    return frozenset(row["record"]["image"] for row in rest.core.store.living() if row["record"].get("image"))


def _name(query: dict[str, str]) -> str:
    name = query.get("name") or ""
    if not name:
        raise errors.InvalidArgument("name is missing")
    return name


def _shown(image: dict[str, Any]) -> dict[str, Any]:
    return {key: image.get(key) for key in ("name", "digest", "source", "size", "created", "platform")}
