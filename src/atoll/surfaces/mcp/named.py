"""agentkernel's tools: one command in a fresh sandbox, and sandboxes with names."""

import base64
import dataclasses
from typing import Any

from atoll import errors, profiles
from atoll.model import CreateSandbox, ExecSpec, Mount, RunOnce, SandboxInfo, convert, unbase64
from atoll.surfaces.mcp import content, files, tools
from atoll.surfaces.mcp.client import Call, given, tool
from atoll.words import agentkernel as words

DETECT = "auto"
_KEPT = {"output_limit": 4096}


async def run_command(call: Call, asked: tools.RunBoth) -> content.Result:
    """`sandbox_run` with a command."""
    _refuse_ports(asked.ports)
    argv: list[str] = given(asked.command, [])
    mode = given(asked.compatibility_mode) or call.mode
    profile = given(asked.profile) or call.settings.profile
    network = given(asked.network, True)
    image = given(asked.image)
    spec = CreateSandbox(
        image=words.image_name(image) if image else DETECT,
        program=None if image else argv[0][:4096],
        runtime=call.settings.runtime,
        profile=profile,
        mode=mode,
        network=network,
    )
    call.settings.ceiling.check(spec)
    spec.mounts = _project(call, mode, profile, network)
    ceiling = dataclasses.replace(call.settings.ceiling, mounts=True)  # the person who opened the door chose it
    millis = given(asked.timeout_ms) or (given(asked.timeout) or 30) * 1000
    fields = {"argv": argv, "env": asked.env, "cwd": given(asked.cwd), "timeout_ms": millis, **_KEPT}
    once = RunOnce(sandbox=spec, command=convert(ExecSpec, fields), any_host=call.settings.any_host)
    return _ran(await call.follow(call.core.once.stream(call.who, once, ceiling)))


def _project(call: Call, mode: str | None, profile: str | None, network: bool) -> list[Mount]:
    """The project a mode shows to its sandbox; read-only, because the model decides when to run what."""
    source = call.settings.project
    policy = profiles.merge(mode=mode, profile=profile, no_network=not network)
    if source is None or not policy.mount_cwd or mode is None:
        return []
    return [Mount(source=source, target="/workspace", read_only=not call.settings.allow_host_access)]


async def exec_named(call: Call, asked: tools.ExecBoth) -> content.Result:
    """`sandbox_exec` with a name."""
    info = await _known(call, given(asked.name))
    if not isinstance(asked.command, list) or not asked.command:
        raise errors.InvalidArgument("command must be an array: the program and its arguments")
    cwd = given(asked.workdir) or given(asked.cwd)
    millis = given(asked.timeout_ms) or (given(asked.timeout) or 30) * 1000
    fields = {"argv": asked.command, "env": words.environment(asked.env), "cwd": cwd, "timeout_ms": millis, **_KEPT}
    if asked.sudo:
        fields["user"] = "root"
    return _ran(await call.follow(call.core.commands.stream(call.who, info.id, convert(ExecSpec, fields))))


@tool("sandbox_create")
async def create(call: Call, asked: tools.CreateNamed) -> content.Result:
    _refuse_ports(asked.ports)
    if asked.source_url or asked.source_ref:
        raise errors.InvalidArgument("source_url is not supported here")
    image = given(asked.image)
    spec = CreateSandbox(
        name=words.sandbox_name(asked.name),
        image=words.image_name(image) if image else DETECT,
        program=None if image else "sh",
        runtime=call.settings.runtime,
        profile=call.settings.profile,
        mode=call.mode or ("native" if call.settings.any_host else None),
        persistent=True,
    )
    call.settings.ceiling.check(spec)
    info = await call.core.sandboxes.create(call.who, spec)
    return content.text(
        f"Sandbox '{info.name}' created and started with image '{info.image}'", structured=words.sandbox(info)
    )


@tool("sandbox_list")
async def list_all(call: Call, asked: tools.Nothing) -> content.Result:
    found = [words.sandbox(one) for one in await call.core.sandboxes.list(call.who) if one.state in words.STATES]
    found.sort(key=lambda one: str(one["name"]))
    lines = ["NAME\tSTATUS\tBACKEND", *(f"{one['name']}\t{one['status']}\t{one['backend']}" for one in found)]
    return content.text("\n".join(lines) if found else "No sandboxes found.", structured={"sandboxes": found})


@tool("sandbox_remove")
async def remove(call: Call, asked: tools.OneName) -> content.Result:
    try:
        await call.core.sandboxes.destroy(call.who, words.sandbox_name(asked.name))
    except (errors.NotFound, errors.SandboxGone):
        return content.text(f"Sandbox '{asked.name}' is not there")
    return content.text(f"Sandbox '{asked.name}' removed")


@tool("sandbox_start")
async def start(call: Call, asked: tools.OneName) -> content.Result:
    info = await _known(call, asked.name)
    if info.state != "running":
        await call.core.sandboxes.start(call.who, info.id)
    return content.text(f"Sandbox '{asked.name}' started")


@tool("sandbox_stop")
async def stop(call: Call, asked: tools.OneName) -> content.Result:
    info = await _known(call, asked.name)
    if info.state != "stopped":
        await call.core.sandboxes.stop(call.who, info.id)
    return content.text(f"Sandbox '{asked.name}' stopped")


@tool("sandbox_file_write")
async def write(call: Call, asked: tools.WriteNamed) -> content.Result:
    info = await _known(call, asked.name)
    path = _path(asked.path)
    try:
        data = unbase64("content", asked.content) if asked.encoding == "base64" else asked.content.encode()
    except ValueError as bad:
        raise errors.InvalidArgument(f"{asked.encoding}: {bad}") from None
    await call.core.files.write(call.who, info.id, path, data, parents=True)
    return content.text(f"Wrote {len(data)} bytes to '{path}' in sandbox '{asked.name}'")


@tool("sandbox_file_read")
async def read(call: Call, asked: tools.ReadNamed) -> content.Result:
    info = await _known(call, asked.name)
    path = _path(asked.path)
    piece = await files.read(call, info.id, path, asked.offset, given(asked.limit))
    shown = piece.text(content.KEPT)
    if shown is not None:
        return content.text(shown)
    raw = piece.raw
    found = content.text(f"[binary file, {len(raw)} bytes, base64 encoded]\n{base64.b64encode(raw).decode()}")
    if content.image_type(raw) is not None:
        found["content"].append(content.binary(path, raw))
    return found


def _ran(ended: content.Ended) -> content.Result:
    """The output; of a command that failed also how."""
    fields, output = ended.fields(), ended.output.text()
    if fields["timed_out"]:
        return content.text(f"Command timed out (exit code 124)\n{output}", is_error=True, structured=fields)
    if ended.exit_code:
        return content.text(f"Command exited with code {ended.exit_code}\n{output}", is_error=True, structured=fields)
    return content.text(output, structured=fields)


async def _known(call: Call, name: str) -> SandboxInfo:
    try:
        info = await call.core.sandboxes.get(call.who, words.sandbox_name(name))
    except errors.NotFound:
        raise errors.NotFound(f"Sandbox '{name}' not found") from None
    if info.state in ("ending", "ended"):
        raise errors.NotFound(f"Sandbox '{name}' not found")
    return info


def _path(text: str) -> str:
    if not text.startswith("/"):
        raise errors.InvalidArgument(f"Invalid path {text!r:.120}: it must be absolute")
    return words.file_path(text)


def _refuse_ports(ports: Any) -> None:
    if ports:
        raise errors.InvalidArgument("ports are not supported here", hint="expose a port with the command line")
