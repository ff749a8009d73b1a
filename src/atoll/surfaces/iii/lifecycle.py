"""create, exec, run, stop, list and catalog::list."""

import asyncio
import os
import resource
import time
import uuid
from collections.abc import Mapping
from contextlib import suppress

from atoll import errors, model
from atoll.core.policy.images import AUTO, StoredImages
from atoll.surfaces.iii import requests as r
from atoll.surfaces.iii.door import ID, IMAGE, INSTANCE, LABEL, TITLE, Door
from atoll.surfaces.iii.failure import Failure, of_boot, of_exec, of_file, of_image
from atoll.surfaces.iii.repairs import nearest_image
from atoll.surfaces.iii.settings import PRESETS
from atoll.surfaces.iii.words import command, point_at_gateway

HOME = "/root"
FOREVER_S = 10 * 365 * 86400.0
AT_NEXT_SCAN_S = 5.0
DISK_MB = 2048
OPEN_FILES = 65_536
LINGER_S = 2.0
STOP_S = 0.8
LANGUAGES = {"node": "js", "js": "js", "javascript": "js", "python": "py", "py": "py", "shell": "sh", "sh": "sh",
             "bash": "sh"}  # fmt: skip
INTERPRETERS = {"js": "node", "py": "python3", "sh": "/bin/sh"}
OUTPUT = 1024 * 1024


# create


async def create(door: Door, request: r.Create, lang: str = "") -> r.Created:
    settings = door.settings
    env = r.environment(request.env)
    ports: list[int] = []
    if request.network:
        env, ports = point_at_gateway(env, settings.host_ports)
    image, program = _image(door, request.image, lang)
    _check_caps(door, request)
    made = str(uuid.uuid4())
    with door.place(made):
        await _have_image(door, image, program)
        idle = settings.default_idle_timeout_secs if request.idle_timeout_secs is None else request.idle_timeout_secs
        labels = {LABEL: door.name, ID: made, IMAGE: request.image, INSTANCE: door.instance}
        if request.name is not None:
            labels[TITLE] = request.name
        try:
            spec = model.convert(
                model.CreateSandbox,
                {
                    "image": image,
                    "program": program,
                    "runtime": settings.isolation,
                    "env": {"HOME": HOME, **env},
                    "limits": _limits(door, request),
                    "network": bool(request.network),
                    "hosts": ["*"] if request.network else None,
                    "host_ports": ports,
                    "idle_timeout_s": float(min(idle, FOREVER_S)) or AT_NEXT_SCAN_S,
                    "lifetime_s": float(min(settings.max_lifetime_secs, FOREVER_S)) or FOREVER_S,
                    "workdir": HOME,
                    "labels": labels,
                    "alias": made,
                },
            )
            info = await door.core.sandboxes.create(door.who, spec)
        except errors.AtollError as error:
            raise of_boot(error) from None
    door.remember(made)
    if request.network:
        door.watch()
    return r.Created(
        sandbox_id=made,
        image=request.image,
        isolation=info.runtime,
        image_used=info.image,
        expires_in_secs=settings.max_lifetime_secs or None,
    )


def _image(door: Door, name: str, lang: str) -> tuple[str, str | None]:
    """The catalogue name as core's image, and for a preset the program that says which one."""
    allowed = door.settings.allowed()
    if name not in allowed:
        listed = ", ".join(allowed) or "none: image_allowlist is empty"
        near = nearest_image(name, allowed, lang)
        raise Failure(
            "S100",
            f"the image {name!r:.120} is not known or not allowed here",
            fix={"image": near} if near else None,
            note=f"allowed: {listed}",
        )
    if name in PRESETS:
        return AUTO, PRESETS[name]
    return door.settings.custom_images[name], None


def _check_caps(door: Door, request: r.Create) -> None:
    cap = door.settings.per_image_caps.get(request.image)
    asked = (
        ("cpus", request.cpus or door.settings.default_cpus or 1, cap.max_cpus if cap else None),
        ("memory_mb", request.memory_mb or door.settings.default_memory_mb or 512, cap.max_memory_mb if cap else None),
    )
    over = [(what, value, most) for what, value, most in asked if most is not None and value > most]
    if over:
        what, value, most = over[0]
        limit = f"max_{what} of {request.image} is {most}"
        raise Failure(
            "S400",
            f"{what} {value} is more than this image may have: {limit}",
            fix={what: most for what, _, most in over},
            note=limit,
        )


def _limits(door: Door, request: r.Create) -> Mapping[str, float]:
    """Return the limits that the caller or the operator asked for. The rest is left to core's defaults, which need not be held."""
    settings = door.settings
    found: dict[str, float | None] = {
        "cpus": request.cpus or settings.default_cpus,
        "memory_mb": request.memory_mb or settings.default_memory_mb,
        "disk_mb": settings.disk_mb,
    }
    if os.geteuid() == 0:
        found["disk_mb"] = settings.disk_mb or DISK_MB
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]  # of this daemon: nobody below it can have more
    found["files"] = OPEN_FILES if most == resource.RLIM_INFINITY else min(OPEN_FILES, most)
    return {key: value for key, value in found.items() if value is not None}


async def _have_image(door: Door, image: str, program: str | None) -> None:
    """Bring it here before the sandbox is made, so that a failed pull is told from a failed start."""
    images = door.core.images
    try:
        if not door.settings.auto_install and isinstance(images, StoredImages):
            await asyncio.to_thread(_local_only, images, image, program)
        await images.choose(image, program)
    except errors.AtollError as error:
        raise of_image(error) from None


def _local_only(images: StoredImages, image: str, program: str | None) -> None:
    from atoll.images import Detection, detect, obtain

    found = detect([program], None, images.catalog) if program else Detection(image, image, "", explicit=True)
    try:
        obtain(found, images.store, images.catalog, allowlist=images.allowlist, may_fetch=False)
    except errors.ImageNotAllowed:
        raise
    except errors.NotFound as error:
        raise Failure("S101", f"{error.message}, and auto_install is off") from None


# exec


async def execute(door: Door, request: r.Exec) -> r.Executed:
    argv = command(request.cmd, request.args, request.argv)
    sandbox = r.sandbox_id(request.sandbox_id)
    spec = _spec(door, argv, request.env, request.stdin, request.timeout_ms, request.workdir)
    door.find(sandbox)
    with door.slot(sandbox):
        return await _executed(door, sandbox, spec)


def _spec(
    door: Door, argv: list[str], env: r.Env, stdin: str | None, timeout_ms: int | None, workdir: str | None
) -> model.ExecSpec:
    longest = door.settings.longest_exec_ms
    if stdin is not None:
        r.base64_bytes("stdin", stdin)
    fields: Mapping[str, object] = {
        "argv": argv,
        "env": r.environment(env),
        "stdin_b64": stdin,
        "timeout_ms": longest if timeout_ms is None else min(timeout_ms, longest),
        "cwd": HOME if workdir is None else r.absolute("workdir", workdir),
        "output_limit": OUTPUT,
    }
    try:
        return model.convert(model.ExecSpec, fields)
    except errors.AtollError as error:
        raise of_exec(error) from None


async def _executed(door: Door, sandbox: str, spec: model.ExecSpec) -> r.Executed:
    if spec.timeout_ms == 0:
        raise _late(0, {"stdout": "", "stderr": "", "duration_ms": 0})
    try:
        result = await door.core.commands.exec(door.who, sandbox, spec)
    except (errors.FileNotFound, errors.NotADirectory) as error:
        return _not_started(f"atoll: workdir {spec.cwd}: {error.message}\n")
    except errors.AtollError as error:
        raise of_exec(error) from None
    answer = _answer(result)
    if result.timed_out:
        told: Mapping[str, object] = {
            "stdout": answer.stdout,
            "stderr": answer.stderr,
            "duration_ms": answer.duration_ms,
        }
        raise _late(spec.limit_ms, told)
    with suppress(errors.AtollError):
        await _linger(door, sandbox, result, answer)
    return answer


def _late(limit_ms: int, details: Mapping[str, object]) -> Failure:
    return Failure("S200", f"the command did not end within {limit_ms} ms and was killed", details=details)


def _not_started(why: str) -> r.Executed:
    return r.Executed(stdout="", stderr=why, exit_code=127, timed_out=False, duration_ms=0, success=False)


def _answer(result: model.ExecResult) -> r.Executed:
    return r.Executed(
        stdout=result.stdout,
        stderr=result.stderr,
        exit_code=result.exit_code,
        timed_out=result.timed_out,
        duration_ms=result.duration_ms,
        success=result.exit_code == 0 and not result.timed_out,
        stdout_truncated=result.stdout_truncated,
        stderr_truncated=result.stderr_truncated,
        stdout_b64=result.stdout_b64,
        stderr_b64=result.stderr_b64,
    )


async def _linger(door: Door, sandbox: str, result: model.ExecResult, answer: r.Executed) -> None:
    """The program has ended. While something it left behind still holds its output, wait a moment for the rest of it."""
    left = await door.core.leftovers.wait(door.who, sandbox, result, LINGER_S)
    answer.background = left.held
    for stream, data in (("stdout", left.stdout), ("stderr", left.stderr)):
        if data and not getattr(answer, f"{stream}_truncated"):
            _append(answer, stream, data)


def _append(answer: r.Executed, stream: str, data: bytes) -> None:
    before: str = getattr(answer, stream)
    encoded = getattr(answer, f"{stream}_b64")
    whole = (r.base64_bytes(stream, encoded) if isinstance(encoded, str) else before.encode()) + data
    text, again = model.shown(whole[:OUTPUT])
    setattr(answer, stream, text)
    setattr(answer, f"{stream}_b64", again)
    setattr(answer, f"{stream}_truncated", len(whole) > OUTPUT)


# run


async def run(door: Door, request: r.Run) -> r.Executed:
    if not request.lang.strip() or "\0" in request.lang:
        fix = {"lang": request.image if request.image in PRESETS else "python"}
        raise Failure("S001", "lang is empty", fix=fix, note="python, node, shell, bash, or the name of a program")
    if "\0" in request.lang or any("\0" in arg for arg in request.args):
        raise Failure("S001", "args and lang must not contain NUL")
    files = [(r.absolute("files.path", file.path), _content(file)) for file in request.files]
    spec = _spec(door, ["true"], request.env, request.stdin, request.timeout_ms, request.workdir)
    step, sandbox = "create", ""
    try:
        wanted = r.Create(
            image=request.image, cpus=request.cpus, memory_mb=request.memory_mb, network=request.network,
            idle_timeout_secs=request.idle_timeout_secs, env=request.env,
        )  # fmt: skip
        sandbox = (await create(door, wanted, request.lang)).sandbox_id
        step = "fs::write (sibling file)"
        for path, content in files:
            await _place(door, sandbox, path, content)
        step = "fs::write (code)"
        extension = LANGUAGES.get(request.lang, "txt")
        path = f"/tmp/run.{extension}"
        await _place(door, sandbox, path, request.code.encode("utf-8", "replace"))
        step = "exec"
        spec.argv = [await _interpreter(door, sandbox, request.lang, extension), path, *request.args]
        if request.network:
            spec.env = {}  # the boot environment has it, pointed at the gateway
        with door.slot(sandbox):
            answer = await _executed(door, sandbox, spec)
        answer.sandbox_id = sandbox
        return answer
    except Failure as inner:
        raise _in_step(step, sandbox, inner) from None
    finally:
        if sandbox and not request.keep_sandbox:
            await door.end(sandbox)


def _in_step(step: str, sandbox: str, inner: Failure) -> Failure:
    return Failure(
        inner.code,
        f"{step}{f' ({sandbox})' if sandbox else ''}: {inner.message}",
        fix={**(inner.fix or {}), "context": step, "sandbox_id": sandbox, "inner_code": inner.code},
        note=inner.note,
        details=inner.details,
    )


def _content(file: r.RunFile) -> bytes:
    if (file.content is None) == (file.content_b64 is None):
        raise Failure(
            "S001", "a file needs exactly one of content and content_b64", note='{"path": "/a", "content": ""}'
        )
    if file.content is not None:
        return file.content.encode("utf-8", "replace")
    return r.base64_bytes("content_b64", file.content_b64 or "")


async def _place(door: Door, sandbox: str, path: str, content: bytes) -> None:
    try:
        await door.core.files.write(door.who, sandbox, path, content, mode=0o644, parents=True, follow=False)
    except errors.AtollError as error:
        raise of_file(error) from None


async def _interpreter(door: Door, sandbox: str, lang: str, extension: str) -> str:
    if lang != "bash":
        return INTERPRETERS.get(extension, lang)
    for path in ("/bin/bash", "/usr/bin/bash"):
        with suppress(errors.AtollError):
            await door.core.files.ask(door.who, sandbox, "stat", model.StatFile(path=path))
            return path
    return "/bin/sh"


# stop, list, catalog


async def stop(door: Door, request: r.Stop) -> r.Stopped:
    sandbox = r.sandbox_id(request.sandbox_id)
    try:
        door.find(sandbox)
    except Failure as gone:
        if gone.code != "S004":
            raise
        if sandbox not in door.ending:
            return r.Stopped(sandbox_id=sandbox)
    ending = asyncio.ensure_future(door.end(sandbox))
    await asyncio.wait({ending}, timeout=None if request.wait else STOP_S)
    return r.Stopped(sandbox_id=sandbox)


async def listed(door: Door, request: r.Nothing) -> r.Sandboxes:
    now = time.time()
    found = []
    for sandbox, info in await door.alive():
        flights = door.core.places.running(door.who, sandbox)
        last = door.last_exec.get(sandbox)
        found.append(
            r.Listed(
                sandbox_id=sandbox,
                name=info.labels.get(TITLE),
                image=info.labels.get(IMAGE, info.image),
                age_secs=max(0, int(now - info.created_at)),
                exec_in_progress=flights > 0,
                exec_in_flight=flights,
                exec_slots_free=max(0, door.settings.exec_slots - flights),
                stopped=False,
                status=info.state,
                created_at=int(info.created_at),
                last_exec_at=None if last is None else int(last),
                cpus=info.limits["cpus"]["value"],
                memory_mb=int(info.limits["memory_mb"]["value"]),
                network=info.policy.get("network") == "hosts",
                idle_timeout_secs=int(info.idle_timeout_s or 0),
                idle_secs=0 if flights else max(0, int(now - info.last_active)),
                isolation=info.runtime,
            )
        )
    return r.Sandboxes(found)


async def catalog(door: Door, request: r.Nothing) -> r.CatalogList:
    """Exactly what create would accept, each with where it really comes from."""
    isolation = door.settings.isolation
    with suppress(errors.AtollError, OSError):
        isolation = await door.core.backend.pick(isolation)
    found = []
    for name in door.settings.allowed():
        custom = door.settings.custom_images.get(name)
        reference = custom if custom is not None else await asyncio.to_thread(_where_from, door, name)
        found.append(r.CatalogEntry(name, reference, "preset" if custom is None else "custom", isolation))
    return r.CatalogList(found)


def _where_from(door: Door, preset: str) -> str:
    """The reference of a preset: this machine's own files where they have the program, else what would be pulled."""
    from atoll.images import Catalog
    from atoll.images.detect import host_program

    images = door.core.images
    shown = Catalog.load()
    entry = next((shown.get(one.image) for one in shown.presets if one.name == preset), None)
    if entry is None:
        return preset
    if isinstance(images, StoredImages):
        with suppress(errors.AtollError, OSError):
            if images.store.find(entry.oci) is not None:
                return entry.oci
    return "host" if host_program(PRESETS[preset]) is not None else entry.oci
