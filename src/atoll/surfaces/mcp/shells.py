"""atoll's own tool: a shell session, in which directory and environment stay from call to call."""

from atoll import errors
from atoll.model import OpenShell, ShellResult, ShellRun, convert
from atoll.surfaces.mcp import content, tools
from atoll.surfaces.mcp.client import Call, given, tool
from atoll.words import k8e_ids as ids


@tool("sandbox_shell")
async def use_shell(call: Call, asked: tools.UseShell) -> content.Result:
    named, shell = given(asked.session_id), given(asked.shell_id)
    ref = ids.session_ref(named) if named is not None else await call.client.default_session()
    shells = call.core.shells
    if asked.action != "run":
        if shell is None:
            raise errors.InvalidArgument(f"shell_id is needed to {asked.action}")
        verb = shells.interrupt if asked.action == "interrupt" else shells.close
        info = await verb(call.who, ref, shell)
        return content.values({"shell_id": shell, "state": info.state})
    command = given(asked.command)
    if command is None:
        raise errors.InvalidArgument("command is needed")
    spec = ShellRun(command=command, timeout_ms=asked.timeout * 1000, output_limit=4096)
    if shell is None:
        wanted = convert(OpenShell, {"language": asked.language, "user": given(asked.user)})
        shell = (await shells.open(call.who, ref, wanted)).shell_id
    ended = await call.follow(shells.stream(call.who, ref, shell, spec))
    over = isinstance(ended.done, ShellResult) and ended.done.shell_ended
    return content.values({"shell_id": shell, "shell_ended": over, **ended.fields()})
