"""The life of sandboxes: create, get, connect, time out, pause, kill."""

import hashlib
import re
import time
from collections.abc import Mapping

import msgspec

from atoll import errors, model
from atoll.core.access.credentials import may
from atoll.core.policy.images import INTERPRETER
from atoll.model import CreateSandbox, Extend, SandboxInfo
from atoll.server.request import Exchange
from atoll.surfaces.e2b import words
from atoll.surfaces.e2b.control.network import NOTES, hosts_of
from atoll.surfaces.e2b.control.snapshots import name_of
from atoll.surfaces.e2b.control.table import body_of, known, route
from atoll.surfaces.e2b.control.volumes import open_volumes
from atoll.surfaces.e2b.interpreter import variables
from atoll.surfaces.e2b.replies import WireError, nothing
from atoll.surfaces.e2b.served import Served, unknown

BASE, BASE_IMAGE = "base", "host"
NEVER_IDLE = 10 * 365 * 86400
UNSAID, UNSAID_BEFORE = (
    300,
    15,
)  # seconds a sandbox lives when its creator does not say: now, and with `POST /sandboxes`
AT_ONCE = 0.001
_KEY = re.compile(r"[a-z0-9-]{1,255}\Z")
_NAME = re.compile(r"(?:[A-Za-z0-9_.-]+/)?([a-z0-9][a-z0-9_.-]{0,62})(?::default)?\Z")


@route("POST", "v2/sandboxes")
async def create(app: Served, exchange: Exchange) -> None:
    key = exchange.header(b"idempotency-key")
    if key and not _KEY.match(key):
        raise errors.InvalidArgument("Idempotency-Key must be 1 to 255 of a-z, 0-9 and `-`")
    asked = await body_of(exchange, words.NewSandbox)
    if asked.secure is not None:
        raise errors.InvalidArgument("`secure` is not a field of this route: every sandbox has a token")
    await _create(app, exchange, asked, UNSAID, key)


@route("POST", "sandboxes")
async def create_before(app: Served, exchange: Exchange) -> None:
    await _create(app, exchange, await body_of(exchange, words.NewSandbox), UNSAID_BEFORE, "")


async def _create(app: Served, exchange: Exchange, asked: words.NewSandbox, unsaid: int, key: str) -> None:
    spec = new_spec(app, asked, unsaid)
    if key:
        spec.request_id = hashlib.sha256(f"e2b {key}".encode()).hexdigest()
    template = await _template_of(app, exchange, asked.templateID)
    snapshot = None if template else await _snapshot_of(app, exchange, asked.templateID)
    if template and key:
        raise errors.InvalidArgument("an idempotency key and a template of your own cannot be used together")
    if snapshot is not None and key:
        raise errors.InvalidArgument("an idempotency key and a snapshot cannot be used together")
    if template:
        work = app.core.templates.create(exchange.who, asked.templateID, spec)
    elif snapshot is not None:
        work = app.core.snapshots.restore(exchange.who, snapshot, spec)
    else:
        work = app.core.sandboxes.create(exchange.who, spec)
    try:
        info = await exchange.while_connected(work)
    except errors.AlreadyExists:
        raise WireError(
            422, "this idempotency key was used with another request", "idempotency_request_mismatch"
        ) from None
    await open_volumes(app, exchange, info, spec)
    if info.image == INTERPRETER:  # its kernel starts while the caller has not asked for it yet
        app.core.sandboxes.tasks.spawn(app.core.interpreters.ahead(exchange.who, info.id, variables(info.id)))
    await exchange.answer(sandbox(app, info), 201)


def new_spec(app: Served, asked: words.NewSandbox, unsaid: int) -> CreateSandbox:
    """Return what core is asked for. What this server cannot honour is InvalidArgument, never ignored."""
    for name in ("iam", "mcp"):
        if getattr(asked, name):
            raise errors.InvalidArgument(f"{name} is not supported by this server")
    resumes = asked.autoResume is not None and asked.autoResume.enabled
    if asked.autoPauseMemory is False and (not asked.autoPause or resumes):
        raise errors.InvalidArgument("autoPauseMemory: false needs autoPause and no autoResume")
    labels = dict(asked.metadata or {})
    if reserved := [name for name in labels if name.startswith(words.RESERVED)]:
        raise errors.InvalidArgument(
            f"metadata: names that begin with {words.RESERVED!r} are reserved: {reserved[0]!r:.80}"
        )
    network = asked.network or words.NetworkConfig()
    labels[words.TEMPLATE] = asked.templateID
    if asked.network is not None:
        shown = {name: value for name, value in msgspec.to_builtins(asked.network).items() if value is not None}
        labels[words.NETWORK] = msgspec.json.encode(shown).decode()
    if asked.autoPause:
        labels[words.ON_TIMEOUT] = "pause"
    if resumes:
        labels[words.AUTO_RESUME] = "yes"
    at_expiry = ("pause" if asked.autoPauseMemory is not False else "stop") if asked.autoPause else "destroy"
    fields = {
        "image": image_of(app, asked.templateID) or BASE_IMAGE,
        "runtime": app.settings.runtime,
        "lifetime_s": words.seconds(asked.timeout, unsaid),
        "idle_timeout_s": NEVER_IDLE,
        "at_expiry": at_expiry,
        "volumes": [{"name": one.name, "target": one.path} for one in asked.volumeMounts or ()],
        "labels": labels,
        "env": {"E2B_SANDBOX": "true", "E2B_TEMPLATE_ID": asked.templateID, **(asked.envVars or {})},
        "hosts": hosts_of(network, asked.allow_internet_access),
    }
    return model.convert(CreateSandbox, fields)


def image_of(app: Served, template: str) -> str | None:
    """Return the image that a template's name means; None when it means none."""
    found = _NAME.match(template)
    if found is None:
        return None
    if found[1] == BASE:
        return BASE_IMAGE
    if found[1] == INTERPRETER:
        return INTERPRETER
    from atoll.images import Catalog

    image = Catalog.load(app.core.config.images.custom).get(found[1])
    return image.name if image is not None else None


async def _template_of(app: Served, exchange: Exchange, name: str) -> bool:
    """Return whether a name means a finished template of the caller's own. Those of this server come first."""
    if image_of(app, name) is not None:
        return False
    try:
        _, build = await app.core.templates.find(exchange.who, name)
    except errors.NotFound:
        return False
    return build is not None and build.status == "ready"


async def _snapshot_of(app: Served, exchange: Exchange, template: str) -> str | None:
    """Return the caller's snapshot that a template's name means; None for an image, NotFound for neither."""
    if image_of(app, template) is not None:
        return None
    name = name_of(template)
    if not any(one.name == name and one.full for one in await app.core.snapshots.list(exchange.who)):
        raise errors.NotFound(f"template {template!r:.80} was not found")
    return name


def sandbox(app: Served, info: SandboxInfo) -> Mapping[str, object]:
    """Return a sandbox as create, connect and resume answer it."""
    return {
        "templateID": info.labels[words.TEMPLATE],
        "sandboxID": info.id,
        "clientID": words.CLIENT,
        "envdVersion": words.ENVD_VERSION,
        "envdAccessToken": app.tokens.make("envd", info.id),
        "trafficAccessToken": app.tokens.make("traffic", info.id),
        "domain": app.settings.domain,
    }


@route("GET", "sandboxes/*")
async def get(app: Served, exchange: Exchange) -> None:
    info = await known(app, exchange)
    noted = await app.core.notes.get(exchange.who, info.id, NOTES)
    changed = noted.get("network")
    shown = words.network_shown(info, changed if isinstance(changed, dict) else {})
    pauses = words.ON_TIMEOUT in info.labels
    found: dict[str, object] = {
        **words.listed(info),
        "envdAccessToken": app.tokens.make("envd", info.id),
        "domain": app.settings.domain,
        "allowInternetAccess": bool(info.hosts),
        "lifecycle": {"autoResume": words.AUTO_RESUME in info.labels, "onTimeout": "pause" if pauses else "kill"},
    }
    if shown:
        found["network"] = shown
    if words.state_of(info) == "paused":
        found["pauseMode"] = "full" if info.state == "paused" else "filesystem"
    await exchange.answer(found)


@route("DELETE", "sandboxes/*")
async def kill(app: Served, exchange: Exchange) -> None:
    info = await known(app, exchange)
    app.watchers.end(info.id)
    app.started.forget(info.id)
    await app.core.sandboxes.destroy(exchange.who, info.id)
    await nothing(exchange)


@route("POST", "sandboxes/*/timeout")
async def set_timeout(app: Served, exchange: Exchange) -> None:
    asked = await body_of(exchange, words.Timeout)
    info = await known(app, exchange)
    if words.state_of(info) != "running":
        raise unknown(info.id)
    if asked.timeout > words.MOST_SECONDS:
        words.seconds(asked.timeout, UNSAID)
    await app.core.sandboxes.extend(exchange.who, info.id, Extend(lifetime_s=max(AT_ONCE, asked.timeout)))
    await nothing(exchange)


@route("POST", "sandboxes/*/refreshes")
async def refresh(app: Served, exchange: Exchange) -> None:
    asked = await body_of(exchange, words.Refresh, optional=True)
    info = await known(app, exchange)
    await _lengthen(app, exchange, info, words.seconds(asked.duration, UNSAID_BEFORE))
    await nothing(exchange)


async def _lengthen(app: Served, exchange: Exchange, info: SandboxInfo, seconds: int) -> None:
    """Move the end of a running sandbox, never to an earlier time."""
    if info.expires_at is not None and info.expires_at < time.time() + seconds:
        await app.core.sandboxes.extend(exchange.who, info.id, Extend(lifetime_s=seconds))


@route("POST", "sandboxes/*/pause")
async def pause(app: Served, exchange: Exchange) -> None:
    asked = await body_of(exchange, words.Pause, optional=True)
    info = await known(app, exchange)
    if words.state_of(info) == "paused":
        raise WireError(409, "the sandbox is paused already")
    sandboxes = app.core.sandboxes
    await sandboxes.extend(exchange.who, info.id, Extend(lifetime_s=None))  # what is paused has no end
    try:
        if asked.memory is False:
            await sandboxes.stop(exchange.who, info.id)
            app.started.forget(info.id)
        else:
            await sandboxes.pause(exchange.who, info.id)
    except errors.AtollError:
        left = max(AT_ONCE, (info.expires_at or 0) - time.time())
        await sandboxes.extend(exchange.who, info.id, Extend(lifetime_s=left))
        raise
    await nothing(exchange)


async def _resume(app: Served, exchange: Exchange, info: SandboxInfo, seconds: int) -> None:
    if info.state == "paused":
        await app.core.sandboxes.resume(exchange.who, info.id)
    else:
        await app.core.sandboxes.start(exchange.who, info.id)
    await app.core.sandboxes.extend(exchange.who, info.id, Extend(lifetime_s=seconds))


@route("POST", "sandboxes/*/resume")
async def resume(app: Served, exchange: Exchange) -> None:
    asked = await body_of(exchange, words.Resume, optional=True)
    info = await known(app, exchange)
    if words.state_of(info) == "running":
        raise WireError(409, "the sandbox is running already")
    if asked.autoPause is not None and asked.autoPause != (words.ON_TIMEOUT in info.labels):
        raise errors.InvalidArgument("autoPause cannot be changed after create")
    await _resume(app, exchange, info, words.seconds(asked.timeout, UNSAID_BEFORE))
    await exchange.answer(sandbox(app, info), 201)


@route("POST", "sandboxes/*/connect")
@route("POST", "v2/sandboxes/*/connect")
async def connect(app: Served, exchange: Exchange) -> None:
    asked = await body_of(exchange, words.Connect, optional=True)
    if asked.timeout is None and exchange.parts[0] != "v2":
        raise errors.InvalidArgument("timeout is missing")
    seconds = words.seconds(asked.timeout, UNSAID)
    info = await known(app, exchange)
    running = words.state_of(info) == "running"
    if running:
        await _lengthen(app, exchange, info, seconds)
    else:
        await _resume(app, exchange, info, seconds)
    await exchange.answer(sandbox(app, info), 200 if running else 201)


@route("GET", "templates/aliases/*")
async def template_alias(app: Served, exchange: Exchange) -> None:
    name = exchange.parts[2]
    if not may(exchange.who, "use"):
        raise errors.PermissionDenied("this key does not have the scope 'use'")
    if await _template_of(app, exchange, name):
        template, _ = await app.core.templates.find(exchange.who, name)
        return await exchange.answer({"templateID": template.id, "public": False})
    snapshot = await _snapshot_of(app, exchange, name)
    await exchange.answer({"templateID": name, "public": snapshot is None})
