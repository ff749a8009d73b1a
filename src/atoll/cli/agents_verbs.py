"""The verbs that bring atoll to coding agents, MCP and skills, for the one table in `cli/verbs.py`."""

from __future__ import annotations

from .grammar import Flag, Verb

MCP = (
    Flag("tools", "SET", "k8e (default), agentkernel or all"),
    Flag("http", "", "serve HTTP, until interrupted, instead of stdio"),
    Flag("http-addr", "ADDRESS", "where (default: :8811, which is loopback; other addresses need API keys)"),
    Flag("tenant-id", "NAME", "use this tenant's sandbox, and leave it running"),
    Flag("tls-cert", "FILE", "not needed: the daemon is local"),
    Flag("tls-key", "FILE", "not needed: the daemon is local"),
    Flag("allow-host-access", "", "callers may ask for permissive and for every public host"),
)

VERBS = (
    Verb(
        "mcp", "mcp:serve", "[server]", "An MCP server on stdio or HTTP; `mcp server` has agentkernel's tools.", MCP,
        ("atoll mcp", "atoll mcp --tools all", "atoll mcp --http --http-addr :8811"),
    ),
    Verb("mcp-server", "mcp:serve", "", "The same as `mcp server`.", MCP),
)  # fmt: skip
ALIASES = {"sandbox-mcp": "mcp"}
