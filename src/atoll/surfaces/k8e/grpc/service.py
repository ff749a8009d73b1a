"""`sandbox.v1.SandboxService`: K8E's 34 RPCs, each a translation to one verb of the core."""

from __future__ import annotations

from atoll.core import Core
from atoll.core.verbs import VERBS, Scope
from atoll.proto.sandbox.v1 import sandbox_pb2
from atoll.server.tls import Authority

from .account import Account
from .calls import Kind
from .content import Content
from .execution import Execution
from .extensions import Extensions
from .sessions import Sessions
from .terminals import Terminals

DESCRIPTOR = sandbox_pb2.DESCRIPTOR.services_by_name["SandboxService"]

# The verb of each RPC. Its row says who may call it, and whether it counts as a write.
VERB = {
    "CreateSession": "create", "GetSession": "get", "ListSessions": "list", "DestroySession": "destroy",
    "PauseSession": "stop", "ResumeSession": "start", "RunSubAgent": "subagents.create", "Login": "certificates.issue",
    "Exec": "commands.exec", "ExecStream": "commands.stream", "PollRun": "commands.poll", "PipInstall": "commands.exec",
    "GetProcesses": "commands.processes", "GetTranscript": "history.transcript", "GetEvents": "history.events",
    "WriteFile": "files.write", "ReadFile": "files.read", "ListFiles": "files.list",
    "ConfirmAction": "approvals.request", "ApproveAction": "approvals.decide",
    "SnapshotPut": "snapshots.put_manifest", "SnapshotGet": "snapshots.get_manifest",
    "SnapshotList": "snapshots.manifest_names",
    "CreateTerminal": "commands.background", "TerminalStream": "commands.attach", "TerminalWrite": "commands.stdin",
    "TerminalResize": "commands.resize", "TerminalForeground": "commands.foreground",
    "TerminalSignal": "commands.signal", "TerminalDestroy": "commands.kill",
    "ExposeService": "ports.expose", "UnexposeService": "ports.unexpose", "ListExposed": "ports.list",
    "UpdateAllowedHosts": "hosts.change",
}  # fmt: skip
# A terminal is typed into: one call for each key press is not a flood.
_UNCOUNTED = ("TerminalWrite", "TerminalResize")


def kind_of(rpc: str) -> Kind:
    """Return the rate that an RPC counts against."""
    if rpc in _UNCOUNTED:
        return None
    return "write" if VERBS[VERB[rpc]].writes else "read"


KINDS: dict[str, Kind] = {method.name: kind_of(method.name) for method in DESCRIPTOR.methods}
SCOPES: dict[str, Scope] = {rpc: VERBS[name].door or VERBS[name].scope for rpc, name in VERB.items()}


class SandboxService(Sessions, Execution, Content, Terminals, Extensions, Account):
    def __init__(self, core: Core, authority: Authority) -> None:
        self.core = core
        self.authority = authority
