"""K8E's module name for the Python SDK: `from sandbox_client import SandboxClient, sandbox_session`."""

from atoll.surfaces.k8e.sdk._async.client import AsyncSandboxClient, async_sandbox_session
from atoll.surfaces.k8e.sdk._sync.client import (
    Approval,
    ExecResult,
    FileEntry,
    SandboxClient,
    Session,
    sandbox_session,
)

__all__ = [
    "Approval",
    "AsyncSandboxClient",
    "ExecResult",
    "FileEntry",
    "SandboxClient",
    "Session",
    "async_sandbox_session",
    "sandbox_session",
]
