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
SKILL = (
    Flag("skill", "NAME", "k8e-sandbox (default) or agentkernel"),
    Flag("global", "", "in your home directory", short="g"),
    Flag("project", "", "in this directory"),
    Flag("permissions", "", "also add the allow and ask lists for Claude Code"),
    Flag("dry-run", "", "only say what would be done"),
    Flag("uninstall", "", "take it away again"),
    Flag("force", "", "replace a skill file that was changed by hand", short="f"),
)
_WHO = "claude, claude-desktop, codex, gemini, openclaw, kiro, pi, opencode, dsh, mcp, all or auto"

VERBS = (
    Verb(
        "mcp", "mcp:serve", "[server]", "An MCP server on stdio or HTTP; `mcp server` has agentkernel's tools.", MCP,
        ("atoll mcp", "atoll mcp --tools all", "atoll mcp --http --http-addr :8811"),
    ),
    Verb("mcp-server", "mcp:serve", "", "The same as `mcp server`.", MCP),
    Verb(
        "skill install", "skill:install", "[TARGET]", f"Teach a coding agent to use atoll: {_WHO} (default: auto).", SKILL,
        ("atoll skill install claude --permissions", "atoll skill install all --dry-run"),
    ),
    Verb("skill uninstall", "skill:uninstall", "[TARGET]", "Take away what `skill install` made.", SKILL),
    Verb("skill list", "skill:list_all", "", "Where skills and MCP entries are.", (Flag("json", "", "JSON instead of text"),)),
    Verb("plugin install", "skill:install_plugin", "[TARGET]", "agentkernel's skill and MCP entry, in this project.", SKILL),
    Verb("plugin list", "skill:list_all", "", "The same as skill list.", (Flag("json", "", "JSON instead of text"),)),
    Verb("sandbox-install-skill", "skill:install_k8e", "[TARGET]", "K8E's skill and MCP entry (default: all).", SKILL),
)  # fmt: skip
ALIASES = {"sandbox-mcp": "mcp"}
