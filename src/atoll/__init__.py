"""atoll: a place where an agent can run code that cannot hurt the machine it runs on.

This module is the public API and nothing else. Names are loaded when first used, so that `import atoll` costs next to
nothing and the CLI never pays for the SDK.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from . import errors as errors
    from .client._async.interpreter import AsyncInterpreter
    from .client._async.sandbox import AsyncCommand, AsyncSandbox
    from .client._async.shells import AsyncShell
    from .client._async.terminals import AsyncPty
    from .client._sync.interpreter import Interpreter
    from .client._sync.sandbox import Command, Sandbox
    from .client._sync.shells import Shell
    from .client._sync.terminals import Pty
    from .client.results import (
        CellError,
        CellOutcome,
        CellResult,
        CodeContext,
        CommandInfo,
        Event,
        ExecResult,
        FileInfo,
        Output,
        ProcessInfo,
        SandboxInfo,
        ShellInfo,
        Started,
    )
    from .errors import AtollError
    from .surfaces.k8e.sdk._async.client import AsyncSandboxClient, async_sandbox_session
    from .surfaces.k8e.sdk._sync.client import SandboxClient, sandbox_session

__version__ = "0.1.0"

_HOMES = {
    "Sandbox": ".client._sync.sandbox",
    "Command": ".client._sync.sandbox",
    "Pty": ".client._sync.terminals",
    "AsyncSandbox": ".client._async.sandbox",
    "AsyncCommand": ".client._async.sandbox",
    "AsyncPty": ".client._async.terminals",
    "Shell": ".client._sync.shells",
    "AsyncShell": ".client._async.shells",
    "Interpreter": ".client._sync.interpreter",
    "AsyncInterpreter": ".client._async.interpreter",
    "CellError": ".client.results",
    "CellOutcome": ".client.results",
    "CellResult": ".client.results",
    "CodeContext": ".client.results",
    "CommandInfo": ".client.results",
    "ShellInfo": ".client.results",
    "Event": ".client.results",
    "ExecResult": ".client.results",
    "FileInfo": ".client.results",
    "Output": ".client.results",
    "ProcessInfo": ".client.results",
    "SandboxInfo": ".client.results",
    "Started": ".client.results",
    "SandboxClient": ".surfaces.k8e.sdk._sync.client",
    "sandbox_session": ".surfaces.k8e.sdk._sync.client",
    "AsyncSandboxClient": ".surfaces.k8e.sdk._async.client",
    "async_sandbox_session": ".surfaces.k8e.sdk._async.client",
    "AtollError": ".errors",
}

__all__ = [
    "AsyncCommand",
    "AsyncInterpreter",
    "AsyncPty",
    "AsyncSandbox",
    "AsyncSandboxClient",
    "AsyncShell",
    "AtollError",
    "CellError",
    "CellOutcome",
    "CellResult",
    "CodeContext",
    "Command",
    "CommandInfo",
    "Event",
    "ExecResult",
    "FileInfo",
    "Interpreter",
    "Output",
    "ProcessInfo",
    "Pty",
    "Sandbox",
    "SandboxClient",
    "SandboxInfo",
    "Shell",
    "ShellInfo",
    "Started",
    "async_sandbox_session",
    "errors",
    "sandbox_session",
]


def __getattr__(name: str) -> object:
    home = _HOMES.get(name)
    if home is None and name != "errors":
        raise AttributeError(f"module 'atoll' has no attribute {name!r}")
    from importlib import import_module

    found: object = import_module(".errors", __name__) if home is None else getattr(import_module(home, __name__), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
