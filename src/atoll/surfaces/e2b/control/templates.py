"""Templates: builds by the SDKs' steps, uploads by digest, logs, tags."""

import base64
import binascii
from typing import Annotated, Any

from msgspec import Meta, Struct

from atoll import errors
from atoll.core.builds.templates import Line, Template, TemplateBuild
from atoll.model import BuildTemplate, NewTemplate, TemplateStep, convert
from atoll.server.request import Exchange
from atoll.surfaces.e2b.control.pages import page_of
from atoll.surfaces.e2b.control.snapshots import name_of
from atoll.surfaces.e2b.control.table import body_of, route
from atoll.surfaces.e2b.replies import nothing, query_of
from atoll.surfaces.e2b.served import Served
from atoll.surfaces.e2b.words import ENVD_VERSION, Texts, moment

LINES = 100  # of a log in one answer
UPLOADS = "uploads"  # begins the path of an upload's URL, which is its own proof


class _Begin(Struct, kw_only=True):
    """Of both generations: `alias` before, `name` with or without `:tag` now."""

    name: Annotated[str, Meta(max_length=256)] | None = None
    alias: Annotated[str, Meta(max_length=256)] | None = None
    tags: Texts | None = None
    cpuCount: int | None = None
    memoryMB: int | None = None
    minFreeDiskMb: int | None = None
    teamID: str | None = None


class _Step(Struct, kw_only=True):
    type: str
    args: list[str] | None = None
    force: bool | None = None
    filesHash: str | None = None
    forceUpload: bool | None = None


class _Start(Struct, kw_only=True):
    fromImage: str | None = None
    fromTemplate: str | None = None
    fromImageRegistry: Any = None
    force: bool | None = None
    steps: Annotated[list[_Step], Meta(max_length=256)] = []
    startCmd: str | None = None
    readyCmd: str | None = None


class _Tags(Struct, kw_only=True):
    tags: Texts
    target: str | None = None
    name: str | None = None


def _split(name: str) -> tuple[str, list[str]]:
    plain, _, tag = name.rpartition("/")[2].partition(":")
    return plain.lower(), [tag] if tag else []


def _shown(template: Template) -> dict[str, object]:
    ready = [build for build in template.builds.values() if build.status == "ready"]
    last = max(ready, key=lambda build: build.created_at, default=None)
    newest = max(template.builds.values(), key=lambda build: build.created_at, default=None)
    changed = moment(newest.created_at if newest is not None else template.created_at)
    return {
        "templateID": template.id,
        "buildID": last.id if last is not None else newest.id if newest is not None else "",
        "buildStatus": newest.status if newest is not None else "waiting",
        "buildCount": len(template.builds),
        "cpuCount": int((last and last.cpus) or 1),
        "memoryMB": int((last and last.memory_mb) or 512),
        "diskSizeMB": 4096,
        "public": False,
        "aliases": [template.name],
        "names": [template.name],
        "createdAt": moment(template.created_at),
        "updatedAt": changed,
        "lastSpawnedAt": None,
        "spawnCount": 0,
        "createdBy": None,
        "envdVersion": ENVD_VERSION,
    }


@route("POST", "v3/templates")
@route("POST", "v2/templates")
async def begin(app: Served, exchange: Exchange) -> None:
    asked = await body_of(exchange, _Begin)
    name, tags = _split(asked.name or asked.alias or "")
    fields = {"name": name, "cpus": asked.cpuCount, "memory_mb": asked.memoryMB}
    template, build = await app.core.templates.begin(exchange.who, convert(NewTemplate, fields))
    tags = list(dict.fromkeys([*(asked.tags or ()), *tags])) or ["default"]
    app.tags[build.id] = tags
    while len(app.tags) > _MOST_BEGUN:
        del app.tags[next(iter(app.tags))]
    answer = {
        "templateID": template.id, "buildID": build.id, "public": False, "names": [template.name],
        "aliases": [template.name], "tags": tags,
    }  # fmt: skip
    await exchange.answer(answer, 202)


_MOST_BEGUN = 10_000  # builds whose tags are remembered until they start


@route("GET", "templates/*/files/*")
async def upload_link(app: Served, exchange: Exchange) -> None:
    """Say where a step's files go. The URL carries a token, because the SDKs send no key there."""
    await app.core.templates.find(exchange.who, exchange.parts[1])
    name = exchange.parts[3]
    present = app.core.builds.uploads.find(exchange.who, name) is not None
    host = exchange.header(b"host") or app.settings.domain
    owner = base64.urlsafe_b64encode(exchange.who.owner.encode()).decode().rstrip("=")
    token = app.tokens.make("upload", f"{exchange.who.owner} {name}")
    answer = {"present": present, "url": f"http://{host}/{UPLOADS}/{owner}/{name}/{token}", "headers": {}}
    await exchange.answer(answer, 201)


async def upload(app: Served, exchange: Exchange) -> None:
    """Take a step's files, when the URL's token fits owner and digest."""
    if len(exchange.parts) != 4 or exchange.scope["method"] != "PUT":
        raise errors.NotFound("no such upload")
    _, encoded, name, token = exchange.parts
    try:
        owner = base64.urlsafe_b64decode(encoded + "=" * (-len(encoded) % 4)).decode()
    except (binascii.Error, ValueError):
        raise errors.NotFound("no such upload") from None
    if not app.tokens.fits("upload", f"{owner} {name}", token):
        raise errors.PermissionDenied("the upload's token is wrong")
    who = app.stand_in(owner)
    await exchange.while_reachable(app.core.templates.upload(who, exchange.chunks(), name))
    await exchange.answer({}, 200)


@route("POST", "v2/templates/*/builds/*")
async def start(app: Served, exchange: Exchange) -> None:
    asked = await body_of(exchange, _Start)
    if asked.fromImageRegistry:
        raise errors.InvalidArgument(
            "credentials of registries are not taken from callers", hint="the operator logs in with `docker login`"
        )
    build_id = exchange.parts[4]
    steps = [
        convert(TemplateStep, {"kind": one.type, "args": one.args or [], "files_hash": one.filesHash or ""})
        for one in asked.steps
    ]
    fields: dict[str, object] = {
        "from_image": asked.fromImage or "", "from_template": asked.fromTemplate or "", "start": asked.startCmd or "",
        "ready": asked.readyCmd or "", "tags": app.tags.pop(build_id, []),
        "force": bool(asked.force) or any(one.force for one in asked.steps),
    }  # fmt: skip
    order = convert(BuildTemplate, fields)
    order.steps = steps
    await app.core.templates.build(exchange.who, exchange.parts[2], build_id, order)
    await exchange.answer({}, 202)


@route("GET", "templates/*/builds/*/status")
async def status(app: Served, exchange: Exchange) -> None:
    template, build = app.core.templates.get(exchange.who, exchange.parts[1], exchange.parts[3])
    query = query_of(exchange)
    offset, most = _number(query, "logsOffset", 0), min(LINES, _number(query, "limit", LINES))
    lines = app.core.templates.lines(build.id, offset, most)
    answer: dict[str, object] = {
        "templateID": template.id,
        "buildID": build.id,
        "status": build.status,
        "logs": [f"{line.message}\n" for line in lines],
        "logEntries": [_entry(line) for line in lines],
    }
    if build.status == "error":
        answer["reason"] = {"message": build.error, **({"step": build.step} if build.step else {})}
    await exchange.answer(answer)


@route("GET", "templates/*/builds/*/logs")
async def logs(app: Served, exchange: Exchange) -> None:
    _, build = app.core.templates.get(exchange.who, exchange.parts[1], exchange.parts[3])
    await exchange.answer({"logs": [_entry(line) for line in app.core.templates.lines(build.id, 0, 10 * LINES)]})


def _entry(line: Line) -> dict[str, object]:
    return {"timestamp": moment(line.at), "message": line.message, "level": line.level}


def _number(query: dict[str, str], name: str, unsaid: int) -> int:
    text = query.get(name) or str(unsaid)
    if not text.isdigit() or len(text) > 9:
        raise errors.InvalidArgument(f"{name} is no number: {text!r:.40}")
    return int(text)


@route("GET", "templates")
@route("GET", "v2/templates")
async def list_templates(app: Served, exchange: Exchange) -> None:
    found = await app.core.templates.list(exchange.who)
    if exchange.parts[0] != "v2":
        return await exchange.answer([_shown(one) for one in found])
    page, more = page_of(found, query_of(exchange), lambda one: (one.created_at, one.id))
    await exchange.answer([_shown(one) for one in page], 200, more)


@route("GET", "templates/*")
async def get(app: Served, exchange: Exchange) -> None:
    template, _ = await app.core.templates.find(exchange.who, exchange.parts[1])
    builds = sorted(template.builds.values(), key=lambda build: build.created_at, reverse=True)
    await exchange.answer({**_shown(template), "builds": [_build(one) for one in builds]})


def _build(build: TemplateBuild) -> dict[str, object]:
    return {
        "buildID": build.id, "status": build.status, "createdAt": moment(build.created_at),
        "updatedAt": moment(build.created_at), "cpuCount": int(build.cpus or 1), "memoryMB": int(build.memory_mb or 512),
    }  # fmt: skip


@route("DELETE", "templates/*")
async def remove(app: Served, exchange: Exchange) -> None:
    """Remove a template, or a snapshot, which is one too."""
    try:
        await app.core.templates.remove(exchange.who, exchange.parts[1])
    except errors.NotFound:
        await app.core.snapshots.delete(exchange.who, name_of(exchange.parts[1]))
    await nothing(exchange)


@route("GET", "templates/*/tags")
async def tags_of(app: Served, exchange: Exchange) -> None:
    template, _ = await app.core.templates.find(exchange.who, exchange.parts[1])
    shown = [
        {"tag": tag, "buildID": build, "createdAt": moment(template.builds[build].created_at)}
        for tag, build in template.tags.items()
        if build in template.builds
    ]
    await exchange.answer(shown)


@route("POST", "templates/tags")
async def assign(app: Served, exchange: Exchange) -> None:
    asked = await body_of(exchange, _Tags)
    build = await app.core.templates.tag(exchange.who, asked.target or "", asked.tags)
    await exchange.answer({"tags": asked.tags, "buildID": build.id}, 201)


@route("DELETE", "templates/tags")
async def untag(app: Served, exchange: Exchange) -> None:
    asked = await body_of(exchange, _Tags)
    await app.core.templates.untag(exchange.who, asked.name or "", asked.tags)
    await nothing(exchange)
