"""`sandbox.v1.SandboxService`: K8E's 34 RPCs, each a translation to one verb of the core."""

from __future__ import annotations

from atoll.core import Core
from atoll.core.access.credentials import Doorkeeper
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

# The contract names nine writes; the others of ours that start or change something cost as much, so they count too.
_WRITES = (
    "CreateSession DestroySession Exec ExecStream PipInstall RunSubAgent WriteFile ConfirmAction ApproveAction "
    "PauseSession ResumeSession Login SnapshotPut CreateTerminal TerminalDestroy ExposeService UnexposeService "
    "UpdateAllowedHosts"
)
KINDS: dict[str, Kind] = dict.fromkeys(_WRITES.split(), "write")
# A terminal is typed into: one call for each key press is not a flood.
KINDS.update(dict.fromkeys(("TerminalWrite", "TerminalResize"), None))
SCOPES = {"ApproveAction": "approve", "Login": ""}


class SandboxService(Sessions, Execution, Content, Terminals, Extensions, Account):
    def __init__(self, core: Core, keeper: Doorkeeper, authority: Authority) -> None:
        self.core = core
        self.keeper = keeper
        self.authority = authority
