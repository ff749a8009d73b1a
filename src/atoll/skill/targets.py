"""Places where each agent looks: directories of skills, and settings that name MCP servers.

Directories of the project are used only where the project already has the agent's folder, unless the project was asked for.
"""

from __future__ import annotations

import os
import shutil
import sys
from dataclasses import dataclass

K8E, AGENTKERNEL = "k8e-sandbox", "agentkernel"
SKILLS = (K8E, AGENTKERNEL)
TARGETS = ("claude", "claude-desktop", "codex", "gemini", "openclaw", "kiro", "pi", "opencode", "dsh", "mcp")
OTHER_NAMES = {
    "claude-code": "claude", "gemini-cli": "gemini", "open-code": "opencode", "claudedesktop": "claude-desktop",
    "openai-codex": "codex",
}  # fmt: skip
HTTP = (("type", "http"),)  # without it Claude Code takes an entry for a program to start, and Gemini for SSE
EVERY = tuple(name for name in TARGETS if name != "mcp")
FALLBACK = ("claude", "codex", "pi")


@dataclass(frozen=True)
class Place:
    """The two roots everything is below, and which of them were asked for. None: as the target usually has it."""

    home: str
    project: str
    only: str | None = None  # "home" or "project"

    def in_home(self, *parts: str) -> str | None:
        return None if self.only == "project" else os.path.join(self.home, *parts)

    def in_project(self, folder: str, *parts: str) -> str | None:
        """Below a dot folder of the project that is there already, or that was asked for."""
        path = os.path.join(self.project, folder)
        if self.only == "home" or (self.only is None and not os.path.isdir(path)):
            return None
        return os.path.join(path, *parts)


@dataclass(frozen=True)
class Entry:
    """A settings file and where in it MCP servers are named.

    `form`: json, toml or opencode. `remote`: the fields beside `url` that name the transport of a
    server that listens; None where this agent starts its servers itself.
    """

    path: str
    keys: tuple[str, ...]
    form: str = "json"
    remote: tuple[tuple[str, str], ...] | None = ()


def skill_directories(target: str, place: Place) -> list[str]:
    """Where the folder of the skill goes."""
    shared = place.in_home(".agents", "skills")
    found: list[str | None] = []
    if target == "claude":
        found = [place.in_home(".claude", "skills"), shared, place.in_project(".claude", "skills")]
    elif target == "codex":
        found = [place.in_home(".codex", "skills"), shared, place.in_project(".codex", "skills")]
        found.append(place.in_project(".agents", "skills") if place.only is None else None)
    elif target == "pi":
        found = [shared, place.in_home(".pi", "agent", "skills"), place.in_project(".pi", "skills")]
        found.append(place.in_project(".agents", "skills") if place.only is None else None)
    elif target in ("openclaw", "gemini"):
        found = [place.in_home(f".{target}", "skills")]
        found.append(place.in_project(f".{target}", "skills") if place.only == "project" else None)
    elif target == "kiro":
        found = [place.in_project(".kiro", "skills") or place.in_home(".kiro", "skills")]
    elif target == "dsh":
        dsh = os.environ.get("DSH_HOME")
        found = [os.path.join(dsh, "skills") if dsh and place.only != "project" else None, shared]
        found += [place.in_project(".dsh", "skills")]
        found.append(place.in_project(".agents", "skills") if place.only is None else None)
    elif target == "opencode":
        found = [place.in_home(".config", "opencode", "skills"), place.in_project(".opencode", "skills")]
    return [path for path in found if path is not None]


def entries(target: str, place: Place, skill: str) -> list[Entry]:
    """The settings that get an MCP entry."""
    home, project = place.in_home, place.only == "project"
    shared = Entry(os.path.join(place.project, ".mcp.json"), ("mcpServers",), remote=HTTP)
    found: list[Entry] = []
    if target == "claude":
        path = home(".claude.json") if not project else None
        found = [Entry(path, ("mcpServers",), remote=HTTP)] if path else [shared]
    elif target == "mcp":
        found = (
            [shared]
            if place.only != "home"
            else [Entry(os.path.join(place.home, ".claude", "mcp.json"), ("mcpServers",), remote=HTTP)]
        )
    elif target == "codex":
        path = home(".codex", "config.toml")
        found = [Entry(path, ("mcp_servers",), "toml")] if path else [shared]
    elif target == "gemini":
        path = home(".gemini", "settings.json") or os.path.join(place.project, ".gemini", "settings.json")
        found = [Entry(path, ("mcpServers",), remote=HTTP)]
    elif target == "kiro":
        path = place.in_project(".kiro", "settings", "mcp.json") or home(".kiro", "settings", "mcp.json")
        found = [Entry(path, ("mcpServers",))] if path else []
    elif target == "openclaw":
        path = home(".openclaw", "openclaw.json")
        found = [Entry(path, ("mcp", "servers"), remote=(("transport", "streamable-http"),))] if path else []
    elif target == "claude-desktop":
        found = [Entry(path, ("mcpServers",), remote=None)] if (path := _desktop(place)) else []
    elif target == "opencode":
        path = home(".config", "opencode", "opencode.json") or os.path.join(place.project, "opencode.json")
        found = [Entry(path, ("mcp",), "opencode")]
    return found


def _desktop(place: Place) -> str | None:
    if place.only == "project":
        return None
    if sys.platform == "darwin":
        return os.path.join(place.home, "Library", "Application Support", "Claude", "claude_desktop_config.json")
    return os.path.join(place.home, ".config", "Claude", "claude_desktop_config.json")


def present(place: Place) -> tuple[str, ...]:
    """The targets that seem to be used here."""
    marks = {
        "claude": (".claude", ".claude.json"), "codex": (".codex",), "gemini": (".gemini",), "openclaw": (".openclaw",),
        "kiro": (".kiro",), "pi": (".pi",), "opencode": (".config/opencode",), "claude-desktop": (".config/Claude",),
    }  # fmt: skip
    found = {
        target for target, names in marks.items() if any(os.path.exists(os.path.join(place.home, n)) for n in names)
    }
    if os.path.isdir(os.path.join(place.project, ".kiro")):  # its contract puts things there
        found.add("kiro")
    return tuple(target for target in marks if target in found)


def chosen(word: str | None, default: str, place: Place) -> tuple[str, ...]:
    """The targets a word means; ValueError for one that means none."""
    word = OTHER_NAMES.get(word or default, word or default)
    if word == "all":
        return EVERY
    if word == "auto":
        return present(place) or FALLBACK
    if word not in TARGETS:
        raise ValueError(f"no target {word!r:.60}; one of {', '.join((*TARGETS, 'all', 'auto'))}")
    return (word,)


def server(skill: str, remote: tuple[tuple[str, str], ...] | None) -> dict[str, object]:
    """Return what an MCP entry says: how to start the server, or where it listens when an address is configured."""
    address = _address() if skill == K8E and remote is not None else None
    if address is not None:
        return {**dict(remote or ()), "url": address}
    program = os.path.abspath(sys.argv[0])
    if os.path.basename(program) not in ("atoll", "agentkernel", "k8e", "k8e-sandbox", "k8e-sandbox-cli"):
        program = os.path.join(os.path.dirname(sys.executable), "atoll")
    if skill == AGENTKERNEL:
        found = shutil.which("agentkernel")
        if found is not None and os.path.realpath(found) == os.path.realpath(program):
            return {"command": "agentkernel", "args": ["mcp", "server"], "env": {}}
        return {"command": _short(program), "args": ["mcp", "server"], "env": {}}
    return {"command": _short(program), "args": ["mcp"]}


def _short(program: str) -> str:
    """`atoll` where PATH leads to this very program, else its full path."""
    found = shutil.which("atoll")
    return "atoll" if found is not None and os.path.realpath(found) == os.path.realpath(program) else program


def _address() -> str | None:
    text = os.environ.get("ATOLL_MCP_ADDR") or os.environ.get("K8E_SANDBOX_MCP_ADDR")
    if not text:
        try:
            with open("/etc/k8e/sandbox-mcp.yaml", encoding="utf-8") as file:
                lines = [line.partition(":") for line in file if line.startswith("addr:")]
        except (OSError, UnicodeDecodeError):
            return None
        text = lines[0][2].strip().strip("\"'") if lines else None
    if not text:
        return None
    if text.startswith(("http://", "https://")):
        return text
    return f"http://127.0.0.1{text}/mcp" if text.startswith(":") else f"http://{text}/mcp"
