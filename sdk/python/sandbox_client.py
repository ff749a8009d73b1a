"""K8E's module name for the Python SDK: `from sandbox_client import SandboxClient, sandbox_session`."""

from atoll.client.k8e import Approval, ExecResult, FileEntry, SandboxClient, Session, sandbox_session
from atoll.client.k8e_async import AsyncSandboxClient, async_sandbox_session

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
