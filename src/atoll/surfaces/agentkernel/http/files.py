"""Files of a named sandbox."""

import base64

from atoll import errors, model
from atoll.server.request import Exchange
from atoll.surfaces.agentkernel.http import bodies
from atoll.surfaces.agentkernel.http.table import Served, known, ok, route
from atoll.words import agentkernel as words

MAX_FILE = 64 * model.MIB


@route("GET", "sandboxes/*/files/*")
async def read_file(app: Served, exchange: Exchange) -> None:
    info, path = await known(app, exchange), words.file_path("/".join(exchange.parts[3:]))

    async def work() -> bytes:
        pieces, size = [], 0
        async with app.core.files.read(exchange.who, info.id, path, None, MAX_FILE + 1) as (_, data):
            async for piece in data:
                pieces.append(bytes(piece))
                size += len(piece)
        if size > MAX_FILE:
            raise errors.InvalidArgument(f"the file is larger than {MAX_FILE} bytes")
        return b"".join(pieces)

    content = await exchange.while_connected(work())
    try:
        text, encoding = content.decode(), "utf8"
    except UnicodeDecodeError:
        text, encoding = base64.b64encode(content).decode(), "base64"
    await ok(exchange, {"content": text, "encoding": encoding, "size": len(content)})


@route("PUT", "sandboxes/*/files/*")
async def write_file(app: Served, exchange: Exchange) -> None:
    request = await app.body(exchange, bodies.WriteFile)
    info, path = await known(app, exchange), words.file_path("/".join(exchange.parts[3:]))
    if request.encoding in (None, "utf8", "utf-8"):
        content = request.content.encode("utf-8", "replace")
    elif request.encoding == "base64":
        try:
            content = model.unbase64("content", request.content)
        except ValueError as bad:
            raise errors.InvalidArgument(str(bad)) from None
    else:
        raise errors.InvalidArgument("encoding must be utf8 or base64")
    await app.core.files.write(exchange.who, info.id, path, content, parents=True)
    await ok(exchange, f"Wrote {len(content)} bytes to {path}")


@route("DELETE", "sandboxes/*/files/*")
async def delete_file(app: Served, exchange: Exchange) -> None:
    info, path = await known(app, exchange), words.file_path("/".join(exchange.parts[3:]))
    await app.core.files.ask(exchange.who, info.id, "remove", model.RemoveFile(path=path))
    await ok(exchange, f"Deleted {path}")


@route("POST", "sandboxes/*/files")
async def write_files(app: Served, exchange: Exchange) -> None:
    request = await app.body(exchange, bodies.WriteFiles)
    info = await known(app, exchange)
    checked = {words.file_path(path): content for path, content in request.files.items()}
    for path, content in checked.items():
        await app.core.files.write(exchange.who, info.id, path, content.encode("utf-8", "replace"), parents=True)
    await ok(exchange, {"written": len(checked)})
