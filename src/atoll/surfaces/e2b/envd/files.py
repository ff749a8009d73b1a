"""envd's REST: files up and down, and a few small routes."""

import posixpath
import zlib
from collections.abc import AsyncIterator

from atoll import errors
from atoll.core.access.principals import Principal
from atoll.server.error_boundary import content_kind
from atoll.server.request import Exchange
from atoll.surfaces.e2b.envd.calls import Call
from atoll.surfaces.e2b.envd.multipart import Parts, boundary_of
from atoll.surfaces.e2b.envd.people import Person, resolve
from atoll.surfaces.e2b.replies import plain, query_of

MOST_INFLATED = 64 * 1024**3
METADATA = b"x-metadata-"
OCTETS, FORM = "application/octet-stream", "multipart/form-data"


async def download(call: Call) -> None:
    query = query_of(call.exchange)
    person = await call.app.people.find(call.who, call.sandbox, query.get("username", ""))
    _check_encodings(call.exchange)
    await call.exchange.while_connected(_send(call, resolve(query.get("path", ""), person)))


async def _send(call: Call, path: str) -> None:
    exchange = call.exchange
    async with call.app.core.files.read(call.who, call.sandbox, path) as (stat, data):
        size = int(stat.get("size") or 0)  # 0 is also what pseudo files say, whatever they hold
        headers = [(b"content-type", OCTETS.encode()), (b"cache-control", b"no-store")]
        if size:
            headers.append((b"content-length", str(size).encode()))
        await exchange.start(200, headers)
        left = size
        async for piece in data:
            if size:
                piece = piece[:left]
                left -= len(piece)
            if piece:
                await exchange.write(piece)
        if left:
            raise errors.Unavailable("the file became shorter while it was read")
    await exchange.end()


def _check_encodings(exchange: Exchange) -> None:
    accepted = exchange.header(b"accept-encoding").lower().replace(" ", "")
    if "identity;q=0" in accepted.split(",") and "gzip" not in accepted:
        raise errors.InvalidArgument("only identity can be sent")


async def upload(call: Call) -> None:
    exchange = call.exchange
    query = query_of(exchange)
    person = await call.app.people.find(call.who, call.sandbox, query.get("username", ""))
    if any(name.startswith(METADATA) for name, _ in exchange.scope["headers"]):
        raise errors.InvalidArgument("metadata of files is not supported by this server")
    body = _inflated(exchange)
    kind = content_kind(exchange)
    if kind == OCTETS:
        if not query.get("path"):
            raise errors.InvalidArgument("path is missing")
        await exchange.answer([await _store(call, person, resolve(query["path"], person), body)])
    elif kind == FORM:
        boundary = boundary_of(exchange.header(b"content-type"))
        await exchange.answer(await _store_all(call, person, query.get("path", ""), Parts(body, boundary)))
    else:
        raise errors.InvalidArgument(f"the content type must be {FORM} or {OCTETS}")


async def _store_all(call: Call, person: Person, path: str, parts: Parts) -> list[dict[str, str]]:
    made: list[dict[str, str]] = []
    seen: set[str] = set()
    async for name in parts.parts():
        if not path and not name:
            raise errors.InvalidArgument("a part has no file name, and there is no path")
        target = posixpath.normpath(resolve(path or name, person))
        if target in seen:
            raise errors.InvalidArgument(f"two files for one path: {plain(target)!r:.200}")
        seen.add(target)
        made.append(await _store(call, person, target, parts.data()))
    if not made:
        raise errors.InvalidArgument("there is no part named `file`")
    return made


async def _store(call: Call, person: Person, path: str, source: AsyncIterator[bytes]) -> dict[str, str]:
    """Write one file in place, which is what those who watch it expect."""
    await call.app.core.files.write(
        call.who, call.sandbox, path, source, parents=True, atomic=False, uid=person.uid, gid=person.gid
    )
    return {"name": plain(posixpath.basename(path)), "path": plain(posixpath.normpath(path)), "type": "file"}


def _inflated(exchange: Exchange) -> AsyncIterator[bytes]:
    encoding = exchange.header(b"content-encoding").lower().strip()
    if encoding in ("", "identity"):
        return exchange.chunks()
    if encoding == "gzip":
        return _gunzip(exchange.chunks())
    raise errors.InvalidArgument(f"the encoding {encoding!r:.40} is not understood")


async def _gunzip(body: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    inflater, size = zlib.decompressobj(31), 0
    try:
        async for data in body:
            while data:
                piece = inflater.decompress(data, 1 << 20)
                data = inflater.unconsumed_tail
                if inflater.eof and inflater.unused_data:
                    raise errors.InvalidArgument("something follows the gzip stream")
                size += len(piece)
                if size > MOST_INFLATED:
                    raise errors.TooLarge(f"the file is larger than {MOST_INFLATED} bytes")
                if piece:
                    yield piece
    except zlib.error:
        raise errors.InvalidArgument("the body is not gzip") from None
    if not inflater.eof:
        raise errors.InvalidArgument("the gzip stream was cut")


async def metrics(call: Call) -> None:
    found = (await call.app.core.metrics.get(call.who, call.sandbox))[-1]
    await call.exchange.answer(
        {
            "ts": int(found.at),
            "cpu_count": found.cpus,
            "cpu_used_pct": found.cpu_percent,
            "mem_total": found.memory_total_bytes,
            "mem_used": found.memory_bytes,
            "mem_cache": 0,
            "mem_total_mib": found.memory_total_bytes >> 20,
            "mem_used_mib": found.memory_bytes >> 20,
            "disk_used": found.disk_bytes,
            "disk_total": found.disk_total_bytes,
        }
    )


async def variables(call: Call, who: Principal) -> None:
    live = call.app.live(who.owner, call.sandbox)
    await call.exchange.answer(dict(live.spec.env) if live is not None else {})
