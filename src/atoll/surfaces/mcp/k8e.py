"""K8E's twelve tools. The text of a result is JSON, and the same values are its structured content."""

from typing import Any

from atoll import errors
from atoll.core.commands.packages import pip_install as pip_install_command
from atoll.labels import IDLE_S, LIFETIME_S
from atoll.model import CreateSandbox, ExecSpec, ListFiles, RunSpec, convert
from atoll.surfaces.mcp import content, files, tools
from atoll.surfaces.mcp.client import Call, given, tool
from atoll.surfaces.mcp.named import exec_named, run_command
from atoll.words import k8e as words
from atoll.words import k8e_ids as ids

FILE_TEXT = 64_000


@tool("sandbox_run")
async def run(call: Call, asked: tools.RunBoth) -> content.Result:
    """Code in the default session, or agentkernel's form: a command in a sandbox of its own."""
    code, command = given(asked.code), given(asked.command)
    if (code is None) == (command is None):
        raise errors.InvalidArgument("sandbox_run needs either code, or command")
    if command is not None:
        return await run_command(call, asked)
    _refuse(asked, "image", "profile", "network", "compatibility_mode", "ports")
    spec = convert(
        RunSpec,
        {"code": code, "language": asked.language, "cwd": given(asked.cwd), "env": asked.env, **_time(asked), **_KEPT},
    )
    session = await call.client.default_session()
    ended = await call.follow(call.core.commands.stream(call.who, session, spec))
    info = await call.core.sandboxes.get(call.who, session)
    replaced, call.client.replaced = call.client.replaced, None
    more = {"session_replaced": replaced} if replaced else {}
    return content.values({**ended.fields(), "session_id": ids.session_id(info), **more})


@tool("sandbox_status")
async def status(call: Call, asked: tools.Nothing) -> content.Result:
    session = ""
    if call.client.session is not None:
        try:
            info = await call.core.sandboxes.get(call.who, call.client.session)
            session = ids.session_id(info) if info.state == "running" else ""
        except errors.NotFound:
            session = ""
    return content.values({"available": True, "session_id": session, "tenant_id": call.settings.tenant})


@tool("sandbox_create_session")
async def create_session(call: Call, asked: tools.CreateSession) -> content.Result:
    tenant = ids.tenant(asked.tenant_id or call.settings.tenant)
    labels = words.tenant_labels(tenant)
    fields: dict[str, object] = {
        "runtime": asked.runtime_class or call.settings.runtime,
        "hosts": asked.allowed_hosts or None,
        "labels": labels,
    }
    if asked.session_id:
        fields["alias"] = labels[words.SESSION_LABEL] = asked.session_id
    else:
        fields.update(idle_timeout_s=float(IDLE_S), lifetime_s=float(LIFETIME_S), keep=bool(tenant))
    spec = convert(CreateSandbox, fields)
    call.settings.ceiling.check(spec)
    info = await call.core.sandboxes.create(call.who, spec)
    return content.values({"session_id": ids.session_id(info), "pod_ip": "", "runtime_class": info.runtime})


@tool("sandbox_destroy_session")
async def destroy_session(call: Call, asked: tools.OneSession) -> content.Result:
    await call.core.sandboxes.destroy(call.who, ids.session_ref(asked.session_id))
    return content.values({"ok": True})


@tool("sandbox_exec")
async def exec_command(call: Call, asked: tools.ExecBoth) -> content.Result:
    session, name = given(asked.session_id), given(asked.name)
    if (session is None) == (name is None):
        raise errors.InvalidArgument("sandbox_exec needs either session_id, or name")
    if name is not None:
        return await exec_named(call, asked)
    ended = await _exec(call, session, asked)
    return content.values(ended.fields())


@tool("sandbox_exec_stream")
async def exec_stream(call: Call, asked: tools.ExecCommand) -> content.Result:
    ended = await _exec(call, asked.session_id, asked)
    note = f"\n[exit code {ended.exit_code}]" if ended.exit_code else ""
    return content.text(ended.output.text() + note, structured=ended.fields())


@tool("sandbox_write_file")
async def write_file(call: Call, asked: tools.WriteFile) -> content.Result:
    options = {"append": True} if asked.mode == "a" else {}
    data = asked.content.encode("utf-8", "surrogatepass")
    path = files.absolute(asked.path)
    await call.core.files.write(call.who, ids.session_ref(asked.session_id), path, data, parents=True, **options)
    return content.values({"ok": True})


@tool("sandbox_read_file")
async def read_file(call: Call, asked: tools.ReadFile) -> content.Result:
    path = files.absolute(asked.path)
    piece = await files.read(call, ids.session_ref(asked.session_id), path, asked.offset, given(asked.limit))
    shown = piece.text(FILE_TEXT)
    if shown is not None:
        return content.text(shown)
    return {"content": [content.binary(path, piece.raw)], "isError": False}


@tool("sandbox_list_files")
async def list_files(call: Call, asked: tools.ListFiles) -> content.Result:
    wanted = {"path": files.WORKSPACE, "recursive": True, "files_only": True, "since": asked.since or None}
    wanted["limit"] = files.MAX_LISTED
    found = await call.core.files.list(call.who, ids.session_ref(asked.session_id), convert(ListFiles, wanted))
    entries = [files.entry(one) for one in found["entries"]]
    more = {"truncated": True} if found.get("truncated") is True else {}
    return content.values({"files": entries, **more})


@tool("sandbox_pip_install")
async def pip_install(call: Call, asked: tools.PipInstall) -> content.Result:
    spec = pip_install_command(asked.packages, **_KEPT)
    ended = await call.follow(call.core.commands.stream(call.who, ids.session_ref(asked.session_id), spec))
    return content.values({"output": ended.output.text(), "exit_code": ended.exit_code}, is_error=ended.exit_code != 0)


@tool("sandbox_run_subagent")
async def run_subagent(call: Call, asked: tools.RunSubagent) -> content.Result:
    parent = ids.session_ref(asked.parent_session_id, "parent_session_id")
    if asked.workspace_path and asked.workspace_path.rstrip("/") != files.WORKSPACE:
        raise errors.InvalidArgument("workspace_path can only be /workspace, which both share")
    info = await call.core.subagents.create(call.who, parent)
    return content.values({"session_id": ids.session_id(info)})


@tool("sandbox_confirm_action")
async def confirm_action(call: Call, asked: tools.ConfirmAction) -> content.Result:
    """Ask, or wait for the answer. Nothing in a result helps to give it."""
    if asked.approval_id:
        found = await call.core.approvals.wait(call.who, asked.approval_id)
    elif asked.action.strip():
        found = await call.core.approvals.request(call.who, ids.session_ref(asked.session_id), asked.action)
    else:
        raise errors.InvalidArgument("sandbox_confirm_action needs action, or approval_id")
    return content.values({"approval_id": found.id, "approved": found.status == "approved", "status": found.status})


_KEPT = {"output_limit": 4096}  # output is gathered as it streams; the result's own copy is not used


async def _exec(call: Call, session: str, asked: Any) -> content.Ended:
    command = asked.command if isinstance(asked.command, str) else None
    fields = {"command": command, "argv": None if command else asked.command, "cwd": given(asked.workdir), **_KEPT}
    fields["env"] = getattr(asked, "env", {}) if isinstance(getattr(asked, "env", {}), dict) else {}
    spec = convert(ExecSpec, {**fields, **_time(asked)})
    return await call.follow(call.core.commands.stream(call.who, ids.session_ref(session), spec))


def _time(asked: Any) -> dict[str, int]:
    seconds, millis = given(asked.timeout), given(getattr(asked, "timeout_ms", None))
    return {"timeout_ms": seconds * 1000 if seconds is not None else millis or 30_000}


def _refuse(asked: tools.RunBoth, *names: str) -> None:
    for name in names:
        if given(getattr(asked, name)):
            raise errors.InvalidArgument(f"{name} belongs to sandbox_run with command, not with code")
