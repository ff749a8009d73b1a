"""Every RPC of K8E, MCP tool and function of iii, called behind its door: core itself refuses, and another's ids are not found."""

import uuid
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest
from google.protobuf.message_factory import GetMessageClass
from lab.principals import key

from atoll import errors
from atoll.core import Core
from atoll.core.verbs import VERBS
from atoll.model import CreateSandbox
from atoll.server.app import ROUTES
from atoll.surfaces.iii.door import LABEL
from atoll.surfaces.iii.door import Door as IiiDoor
from atoll.surfaces.iii.failure import Failure
from atoll.surfaces.iii.settings import Settings as IiiSettings
from atoll.surfaces.iii.table import FUNCTIONS, call
from atoll.surfaces.k8e.grpc import service
from atoll.surfaces.mcp import (  # noqa: F401  # they enter their tools
    k8e,
    named,
    rpc,  # it fills the table of handlers
)
from atoll.surfaces.mcp.client import BadArguments, Client
from atoll.surfaces.mcp.settings import Settings
from atoll.surfaces.mcp.tools import TOOLSETS

OWNER, OTHER, NONE = key("owner", "use"), key("other", "use"), key("none")
OWN_LISTS = {"ListSessions", "SnapshotList"}  # of the caller's own, and empty
OWN_MAKERS = {"CreateSession", "SnapshotPut"}
AT_THE_DOOR = {"PollRun", "ConfirmAction", "ApproveAction", "Login"}  # asked for there
GOOD = {"mode": "w", "packages": ["x"], "argv": ["true"], "layers": ["0" * 64], "command": "true", "host": "127.0.0.1",
        "action": "x", "approval_id": "approval-x", "run_id": "c" * 20, "name": "snap"}  # fmt: skip
UNSAID = {("CreateSession", "mode"), ("CreateSession", "session_id"), ("Exec", "argv"), ("ExecStream", "argv")}
UNUSED = {"sandbox_run": ("command", "name"), "sandbox_create_session": ("session_id",)}


def filled(method: Any, sandbox: str, terminal: str) -> Any:
    """A request that would be good if it came from the owner."""
    made = GetMessageClass(method.input_type)()
    for field in method.input_type.fields:
        if field.message_type is not None or (method.name, field.name) in UNSAID:
            continue
        if field.is_repeated:
            getattr(made, field.name).extend(GOOD.get(field.name, []))
        elif field.type == field.TYPE_STRING:
            if "session" in field.name:
                word: Any = f"sess-{sandbox}"
            elif field.name == "terminal_id":
                word = terminal
            elif method.name == "SnapshotGet":
                word = "theirs"
            else:
                word = "/workspace/x" if "path" in field.name else GOOD.get(field.name, "")
            setattr(made, field.name, word)
        elif field.name in ("port", "rows", "cols"):
            setattr(made, field.name, 24)
        elif field.enum_type is not None:
            setattr(made, field.name, field.enum_type.values[1].number)
    return made


async def outcome(work: Any) -> tuple[str, Any]:
    try:
        if not hasattr(work, "__anext__"):
            return "ok", await work
        async for answer in work:
            return "ok", answer
    except errors.AtollError as error:
        return error.code, error.message
    return "ok", None


async def test_every_rpc_is_refused_without_the_scope_and_finds_nothing_of_another(core: Core) -> None:
    sandbox = (await core.sandboxes.create(OWNER, CreateSandbox(workdir="/tmp"))).id
    rpcs = service.SandboxService(core, None)  # type: ignore[arg-type]
    terminal = (await rpcs.CreateTerminal(OWNER, _terminal(sandbox))).terminal_id
    before = {record["seq"] for record in core.audit.read()}
    wrong = []
    for method in service.DESCRIPTOR.methods:

        async def each(message: Any) -> AsyncIterator[Any]:
            yield message

        for who in (NONE, OTHER):
            message = filled(method, sandbox, terminal)
            asked = each(message) if method.client_streaming else message
            code, answer = await outcome(getattr(rpcs, method.name)(who, asked))
            if who is NONE:
                good = code == "permission_denied" or (method.name in AT_THE_DOOR and code != "ok")
            elif method.name in OWN_LISTS:
                good = code == "ok" and sandbox not in str(answer)
            else:
                good = code in ("not_found", "unauthenticated") or (method.name in OWN_MAKERS and code == "ok")
            if not good:
                wrong.append((method.name, who.name, code, str(answer)[:80]))
    assert wrong == [], "\n".join(map(str, wrong))
    assert (await core.sandboxes.get(OWNER, sandbox)).state == "running"
    written = [record for record in core.audit.read() if record["seq"] not in before]
    plain = [record for record in written if VERBS[record["action"]].scope != "own"]  # those decide themselves
    assert {record["who"] for record in plain} == {OTHER.owner}, "nothing was begun for a key without the scope"
    assert {record["result"] for record in plain} <= {"begun", "not_found", "ok"}


def test_every_rpc_names_a_verb_whose_row_says_who_may_call_it() -> None:
    assert set(service.VERB) == {method.name for method in service.DESCRIPTOR.methods}
    for method, name in service.VERB.items():
        assert service.SCOPES[method] == (VERBS[name].door or VERBS[name].scope)
        assert service.KINDS[method] in (None, "write" if VERBS[name].writes else "read")


def _terminal(sandbox: str) -> Any:
    kind = next(m for m in service.DESCRIPTOR.methods if m.name == "CreateTerminal").input_type
    return GetMessageClass(kind)(session_id=f"sess-{sandbox}", argv=["sleep", "600"], rows=24, cols=80)


async def test_every_tool_is_refused_without_the_scope_and_finds_nothing_of_another(core: Core) -> None:
    made = await core.sandboxes.create(OWNER, CreateSandbox(name="work"))
    words = {"session_id": f"sess-{made.id}", "name": "work", "code": "1", "command": "true", "path": "/tmp/x",
             "content": "x", "packages": ["x"], "action": "x", "parent_session_id": f"sess-{made.id}"}  # fmt: skip
    wrong = []
    for toolset, tools in TOOLSETS.items():
        for name, tool in tools.items():
            fields = set(tool.takes.__struct_fields__)
            given = {word: value for word, value in words.items() if word in fields}
            for word in UNUSED.get(name, ()):
                given.pop(word, None)
            if name == "sandbox_exec":  # one name for two tools: a session of K8E's, or a name of agentkernel's
                given.pop("name" if toolset == "k8e" else "session_id", None)
                given["command"] = "true" if toolset == "k8e" else ["true"]
            if name in ("sandbox_shell", "sandbox_terminal"):
                given["action"] = {"sandbox_shell": "run", "sandbox_terminal": "open"}[name]
            for who in (NONE, OTHER):
                client = Client(core, who, Settings(toolset=toolset))
                try:
                    answer = str(await client.call(name, given))
                except BadArguments as bad:
                    wrong.append((name, who.name, str(bad)))
                    continue
                finally:
                    await client.close()
                if who is NONE and "scope" not in answer and name != "sandbox_status":  # it tells only that it is there
                    wrong.append((toolset, name, who.name, answer[:100]))
                if who is OTHER and made.id in answer and "no sandbox" not in answer:
                    wrong.append((toolset, name, who.name, answer[:100]))
    assert wrong == [], "\n".join(map(str, wrong))
    assert (await core.sandboxes.get(OWNER, made.id)).state == "running"


async def test_every_function_of_iii_finds_nothing_of_another(core: Core) -> None:
    """Their routes need the scope admin; behind those, a sandbox of another owner is not known."""
    sandbox = str(uuid.uuid4())
    await core.sandboxes.create(OWNER, CreateSandbox(name=sandbox, labels={LABEL: "worker"}))
    assert all(ROUTES["POST", f"functions/{name}"].scope == "admin" for name in FUNCTIONS)
    wrong = []
    for name, function in FUNCTIONS.items():
        payload = msgspec.json.decode(function.example.replace("<uuid>", sandbox))
        if name == "sandbox::exec":
            payload = {"sandbox_id": sandbox, "cmd": "true"}
        if "sandbox_id" not in payload:
            continue  # it makes one of its own, or lists the caller's
        for who in (NONE, OTHER):
            with pytest.raises(Failure) as failed:
                await call(IiiDoor(core, who, "worker", IiiSettings()), name, payload)
            if failed.value.code != "S002":
                wrong.append((name, who.name, str(failed.value)[:150]))
    assert wrong == [], "\n".join(map(str, wrong))
    assert (await core.sandboxes.get(OWNER, sandbox)).state == "running"
