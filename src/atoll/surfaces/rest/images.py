"""REST routes for images and for runs that bring their own sandbox. Imported for its entries in the table of `rest`."""

from atoll import errors, model
from atoll.server import frames
from atoll.server.request import Exchange
from atoll.server.routes import Rest, route


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
    verb="images.detect",
)
async def detect(rest: Rest, exchange: Exchange) -> None:
    program = exchange.query("program").get("program") or ""
    await exchange.answer({"program": program, "image": await rest.core.image_verbs.detect(exchange.who, program)})


@route("POST", "/v1/images/detect", "The image for a command in a directory", verb="images.detect_here")
async def detect_here(rest: Rest, exchange: Exchange) -> None:
    asked = await exchange.json(model.DetectImage)
    image = await rest.core.image_verbs.detect_here(exchange.who, asked)
    await exchange.answer({"program": asked.program, "image": image})


@route("GET", "/v1/images", "Images on this machine", verb="images.list")
async def list_images(rest: Rest, exchange: Exchange) -> None:
    await exchange.answer(await rest.core.image_verbs.list(exchange.who))


@route("GET", "/v1/images/inspect", "One image", query=("name",), verb="images.inspect")
async def inspect(rest: Rest, exchange: Exchange) -> None:
    name = exchange.query("name").get("name") or ""
    if not name:
        raise errors.InvalidArgument("name is missing")
    await exchange.answer(await rest.core.image_verbs.inspect(exchange.who, name))


@route("POST", "/v1/images/pull", "Pull an image, telling how far it is", verb="images.pull")
async def pull(rest: Rest, exchange: Exchange) -> None:
    asked = await exchange.json(model.PullImage)
    await frames.send(exchange, rest.core.image_verbs.pull(exchange.who, asked))


@route("POST", "/v1/images/build", "Build an image of Debian packages", verb="images.build")
async def build(rest: Rest, exchange: Exchange) -> None:
    asked = await exchange.json(model.BuildImage)
    await frames.send(exchange, rest.core.image_verbs.build(exchange.who, asked))


@route("POST", "/v1/images/contexts", "Take the files of a build: a tar, which may be compressed", verb="images.upload")
async def upload(rest: Rest, exchange: Exchange) -> None:
    work = rest.core.builds.upload(exchange.who, exchange.chunks())
    await exchange.answer(await exchange.while_reachable(work))


@route("POST", "/v1/images/build-file", "Build an image from a Dockerfile", verb="images.build_file")
async def build_file(rest: Rest, exchange: Exchange) -> None:
    asked = await exchange.json(model.BuildFile)
    await frames.send(exchange, rest.core.builds.build(exchange.who, asked))


@route("POST", "/v1/images/remove", "Remove an image's name, and the image with its last name", verb="images.remove")
async def remove(rest: Rest, exchange: Exchange) -> None:
    asked = await exchange.json(model.PullImage)
    await exchange.answer(await rest.core.image_verbs.remove(exchange.who, asked))


@route("POST", "/v1/images/prune", "Remove what no name and no sandbox needs", verb="images.prune")
async def prune(rest: Rest, exchange: Exchange) -> None:
    asked = await exchange.json(model.Request)
    await exchange.answer(await rest.core.image_verbs.prune(exchange.who, asked))
