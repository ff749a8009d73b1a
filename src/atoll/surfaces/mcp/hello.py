"""A server's description of itself, and the JSON-RPC words both ends of the stdio bridge share. Light: the command line imports it.

`atoll mcp` answers `initialize` from here before it has even found the daemon, so an agent never waits for a start.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any, TypeAlias

    Message: TypeAlias = Mapping[str, object]  # of JSON-RPC, on its way out

K8E, AGENTKERNEL, ALL = "k8e", "agentkernel", "all"
TOOLSETS = (K8E, AGENTKERNEL, ALL)
NAMES = {K8E: "k8e-sandbox", AGENTKERNEL: "agentkernel", ALL: "atoll"}
SERVER_VERSION = "1.0.0"
OLDEST = "2024-11-05"
VERSIONS = (OLDEST, "2025-03-26", "2025-06-18", "2025-11-25")

PARSE_ERROR, INVALID_REQUEST, UNKNOWN_METHOD, BAD_PARAMETERS, INTERNAL = -32700, -32600, -32601, -32602, -32603
MAX_LINE = 4 * 1024 * 1024 - 4096  # one message of the bridge; the daemon takes 4 MiB
GREETED = "notifications/atoll/greeted"  # bridge to daemon: `initialize` has been answered, with these parameters

INSTRUCTIONS = {
    K8E: "Run code with sandbox_run: it makes a sandbox on first use and keeps its files and packages for the next call. "
    "The other tools are for sandboxes with settings of their own. Nothing here touches the user's machine.",
    AGENTKERNEL: "sandbox_run runs one command in a fresh sandbox that is gone afterwards. For work that goes on, use "
    "sandbox_create, then sandbox_exec and the file tools, and sandbox_remove at the end.",
    ALL: "sandbox_run with `code` keeps its files between calls; with `command` it uses a fresh sandbox each time.",
}


def initialized(params: Any, toolset: str) -> Mapping[str, object]:
    """The result of `initialize`: the client's protocol version when it is known here, else the oldest."""
    asked = params.get("protocolVersion") if isinstance(params, dict) else None
    return {
        "protocolVersion": asked if asked in VERSIONS else OLDEST if asked is None else VERSIONS[-1],
        "capabilities": {"tools": {}},
        "serverInfo": {"name": NAMES[toolset], "version": SERVER_VERSION},
        "instructions": INSTRUCTIONS[toolset],
    }


def answer(request: Any, result: Any) -> Message:
    return {"jsonrpc": "2.0", "id": request, "result": result}


def failure(request: Any, code: int, message: str) -> Message:
    return {"jsonrpc": "2.0", "id": request, "error": {"code": code, "message": message}}
