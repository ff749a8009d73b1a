"""Named sandboxes, and what this server can do."""

import time

from atoll import errors, model
from atoll.model import CreateSandbox, LimitsSpec
from atoll.server.request import Exchange
from atoll.surfaces.agentkernel.http import bodies
from atoll.surfaces.agentkernel.http.table import DEFAULT_IMAGE, Served, known, mode, ok, profile, route, sandbox_ref
from atoll.words import agentkernel as words

CAPABILITIES = (
    "mount_cwd", "mount_home", "attach", "host_volumes", "ssh", "proxy_secret_bindings", "secret_files", "snapshots",
    "resume", "full_state_pause_resume", "full_state_fork", "endpoints",
)  # fmt: skip
ABLE = ("mount_cwd", "mount_home", "attach", "snapshots", "resume")


@route("GET", "health")
async def health(app: Served, exchange: Exchange) -> None:
    await exchange.answer({"success": True, "data": "ok", "status": "ok"})


@route("GET", "backends")
async def backends(app: Served, exchange: Exchange) -> None:
    able = dict.fromkeys(CAPABILITIES, False) | dict.fromkeys(ABLE, True)
    found = [
        {
            "backend": status.name,
            "configured": status.works,
            "usable": status.works,
            "readiness_reason": status.why or "works",
            "capabilities": able,
        }
        for status in await app.core.backend.runtimes()
    ]
    try:
        default: str | None = await app.core.backend.pick("auto")
    except errors.AtollError:
        default = None
    await ok(exchange, {"default_backend": default, "backends": found})


@route("GET", "sandboxes")
async def list_sandboxes(app: Served, exchange: Exchange) -> None:
    found = await app.core.sandboxes.list(exchange.who)
    shown = [words.sandbox(info) for info in found if info.state in words.STATES]
    await ok(exchange, sorted(shown, key=lambda entry: entry["name"]))


@route("POST", "sandboxes")
async def create(app: Served, exchange: Exchange) -> None:
    request = await app.body(exchange, bodies.Create)
    request.refuse_unsupported()
    limits = LimitsSpec(cpus=request.vcpus, memory_mb=request.memory_mb)
    spec = CreateSandbox(
        name=words.sandbox_name(request.name),
        image=words.image_name(request.image) if request.image else DEFAULT_IMAGE,
        program=None if request.image else "sh",
        runtime=_runtime(request.backend, app.settings.runtime),
        profile=profile(request.profile),
        mode=mode(request.compatibility_mode) or ("native" if app.settings.any_host else None),
        network=request.network is not False,
        limits=limits,
        persistent=True,
    )
    app.settings.ceiling.check(spec)
    info = await exchange.while_connected(app.core.sandboxes.create(exchange.who, spec))
    await ok(exchange, words.sandbox(info), 201)


def _runtime(backend: str | None, default: str) -> str:
    known = {None: default, "auto": default, "docker": "container", "podman": "container"}
    return known.get(backend, backend or default)


@route("GET", "sandboxes/*")
async def get(app: Served, exchange: Exchange) -> None:
    await ok(exchange, words.sandbox(await known(app, exchange)))


@route("GET", "sandboxes/by-uuid/*")
async def get_by_uuid(app: Served, exchange: Exchange) -> None:
    await ok(exchange, words.sandbox(await known(app, exchange, words.from_uuid(exchange.parts[2]))))


@route("DELETE", "sandboxes/*")
async def remove(app: Served, exchange: Exchange) -> None:
    try:
        await app.core.sandboxes.destroy(exchange.who, sandbox_ref(exchange))
    except errors.NotFound:
        pass
    await ok(exchange, "Sandbox removed")


@route("POST", "sandboxes/*/start")
async def start(app: Served, exchange: Exchange) -> None:
    await app.body(exchange, bodies.Nothing)
    info = await known(app, exchange)
    await ok(exchange, words.sandbox(await app.core.sandboxes.start(exchange.who, info.id)))


@route("POST", "sandboxes/*/stop")
async def stop(app: Served, exchange: Exchange) -> None:
    await app.body(exchange, bodies.Nothing)
    info = await known(app, exchange)
    await ok(exchange, words.sandbox(await app.core.sandboxes.stop(exchange.who, info.id)))


@route("POST", "sandboxes/*/extend")
async def extend(app: Served, exchange: Exchange) -> None:
    by = words.duration((await app.body(exchange, bodies.ExtendTtl)).by)
    info = await known(app, exchange)
    left = max(0.0, info.expires_at - time.time()) if info.expires_at is not None else 0.0
    made = await app.core.sandboxes.extend(exchange.who, info.id, model.Extend(lifetime_s=left + by))
    await ok(exchange, {"expires_at": words.moment(made.expires_at)})


@route("GET", "sandboxes/*/logs")
async def logs(app: Served, exchange: Exchange) -> None:
    info = await known(app, exchange)
    events, _ = await app.core.past.events(exchange.who, info.id, 1000)
    name = info.name or info.id
    await ok(exchange, [{**e, "timestamp": words.moment(e["at"]), "type": e["kind"], "sandbox": name} for e in events])
