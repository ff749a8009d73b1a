"""Skills and MCP entries go where each agent looks, and nobody's settings lose a line."""

import json
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

COMMENTED = """{
  // keep me
  "theme": "dark", /* and me */
  "mcpServers": {
    "other": {"command": "x"}, // trailing comma next
  },
}
"""
DIRECTORIES = {
    "claude": (".claude/skills", ".agents/skills"), "codex": (".codex/skills", ".agents/skills"),
    "pi": (".agents/skills", ".pi/agent/skills"), "openclaw": (".openclaw/skills",), "kiro": (".kiro/skills",),
    "gemini": (".gemini/skills",), "opencode": (".config/opencode/skills",),
}  # fmt: skip


@pytest.mark.parametrize("target", DIRECTORIES)
def test_k8e_P35_each_target_gets_the_skill(place: Any, target: str) -> None:
    place("sandbox-install-skill", target)
    assert place.code == 0, place.out
    found = sorted(str(path.relative_to(place.home)) for path in place.home.rglob("SKILL.md"))
    assert found == sorted(f"{directory}/k8e-sandbox/SKILL.md" for directory in DIRECTORIES[target])


def test_k8e_P35_all(place: Any, write: Callable[..., Path]) -> None:
    """Write to every target, to the project where it has the agent's folder, and take an old folder away."""
    (place.project / ".claude").mkdir()
    old = write("home/.claude/skills/k8e-sandbox-skill/SKILL.md", "old")
    lines = place("sandbox-install-skill")
    assert place.code == 0, place.out
    for directories in DIRECTORIES.values():
        for directory in directories:
            assert (place.home / directory / "k8e-sandbox" / "SKILL.md").is_file()
    assert (place.project / ".claude/skills/k8e-sandbox/SKILL.md").is_file() and not (place.project / ".codex").exists()
    assert not old.parent.exists() and all(line[0] in "+x" for line in lines)
    assert all("up to date" in line for line in place("sandbox-install-skill", "all"))


def test_everyday_9_k8e_P42_an_entry_names_the_command_or_the_url(place: Any) -> None:
    place("sandbox-install-skill", "all")
    entry = json.loads((place.home / ".claude.json").read_text())["mcpServers"]["k8e-sandbox"]
    assert entry["args"] == ["mcp"] and entry["command"].endswith("atoll")
    place("sandbox-install-skill", "all", K8E_SANDBOX_MCP_ADDR=":8811")
    url = {"url": "http://127.0.0.1:8811/mcp"}
    typed = {"type": "http", **url}  # Claude Code refuses an entry without it
    assert json.loads((place.home / ".claude.json").read_text())["mcpServers"]["k8e-sandbox"] == typed
    assert json.loads((place.home / ".gemini/settings.json").read_text())["mcpServers"]["k8e-sandbox"] == typed
    assert json.loads((place.home / ".kiro/settings/mcp.json").read_text())["mcpServers"]["k8e-sandbox"] == url
    claw = json.loads((place.home / ".openclaw/openclaw.json").read_text())["mcp"]["servers"]["k8e-sandbox"]
    assert claw == {"transport": "streamable-http", **url}
    desktop = json.loads((place.home / ".config/Claude/claude_desktop_config.json").read_text())["mcpServers"]
    assert desktop["k8e-sandbox"]["command"]  # it starts its servers itself
    assert tomllib.loads((place.home / ".codex/config.toml").read_text())["mcp_servers"]["k8e-sandbox"] == url
    remote = json.loads((place.home / ".config/opencode/opencode.json").read_text())["mcp"]["k8e-sandbox"]
    assert remote == {"type": "remote", "url": url["url"], "enabled": True}


def test_settings_with_comments_keep_them(place: Any, write: Callable[..., Path]) -> None:
    """Add an entry to settings with comments and trailing commas, change nothing else, and take it out again."""
    path = write("home/.gemini/settings.json", COMMENTED)
    path.chmod(0o600)
    place("skill", "install", "gemini")
    text = path.read_text()
    for line in (
        "// keep me",
        '"theme": "dark", /* and me */',
        '"other": {"command": "x"}, // trailing comma next',
        '"k8e-sandbox"',
    ):
        assert line in text
    assert path.stat().st_mode & 0o777 == 0o600
    place("skill", "uninstall", "gemini")
    assert path.read_text() == COMMENTED


@pytest.mark.parametrize("broken", ["{", '{"a": }', '{"mcpServers": []}', "[1]", "\x00", '{"a": 1} x'])
def test_a_file_that_cannot_be_read_is_never_overwritten(place: Any, write: Callable[..., Path], broken: str) -> None:
    path = write("home/.claude.json", broken)
    toml = write("home/.codex/config.toml", "a = [")
    lines = place("sandbox-install-skill", "all")
    assert place.code == 1 and path.read_text() == broken and toml.read_text() == "a = ["
    assert sum(line.startswith("!") for line in lines) == 2 and (place.home / ".gemini/settings.json").is_file()


def test_toml_keeps_every_other_line(place: Any, write: Callable[..., Path]) -> None:
    before = '# mine\nmodel = "x"  # this one\n\n[mcp_servers.other]\ncommand = "y"\n\n[projects."/p"]\ntrust = true\n'
    path = write("home/.codex/config.toml", before)
    place("skill", "install", "codex")
    assert path.read_text().startswith(before) and "k8e-sandbox" in tomllib.loads(path.read_text())["mcp_servers"]
    place("skill", "install", "codex", K8E_SANDBOX_MCP_ADDR=":9")
    assert tomllib.loads(path.read_text())["mcp_servers"]["k8e-sandbox"] == {"url": "http://127.0.0.1:9/mcp"}
    place("skill", "uninstall", "codex")
    assert path.read_text().strip() == before.strip()


@pytest.mark.parametrize(
    "before",
    [
        'mcp_servers = {other = {command = "y"}}  # inline\n',
        'mcp_servers.k8e-sandbox.url = "old"\nmodel = "x"\n',
        '[mcp_servers.a]\nq = 1\n[p]\nx = 1\n[mcp_servers.k8e-sandbox]\nurl = "old"\n[mcp_servers.b]\nq = 2\n',
    ],
)
def test_toml_is_changed_in_whatever_form_it_is_written(place: Any, write: Callable[..., Path], before: str) -> None:
    path = write("home/.codex/config.toml", before)
    place("skill", "install", "codex", K8E_SANDBOX_MCP_ADDR=":9")
    assert tomllib.loads(path.read_text())["mcp_servers"]["k8e-sandbox"] == {"url": "http://127.0.0.1:9/mcp"}
    place("skill", "uninstall", "codex")
    left, meant = tomllib.loads(path.read_text()), tomllib.loads(before)
    meant["mcp_servers"].pop("k8e-sandbox", None)
    assert left == {key: value for key, value in meant.items() if value}


def test_dry_run_changes_nothing(place: Any, write: Callable[..., Path]) -> None:
    write("home/.claude.json", COMMENTED)
    before = place.snapshot()
    lines = place("skill", "install", "all", "--dry-run", "--permissions")
    assert place.code == 0 and lines and place.snapshot() == before


def test_uninstall_leaves_what_was_there_before(place: Any, write: Callable[..., Path]) -> None:
    write("home/.claude.json", '{"numStartups": 3, "mcpServers": {"other": {"command": "x"}}}')
    write("home/.claude/settings.json", '{"permissions": {"allow": ["Bash(ls)"], "deny": []}}')
    place("skill", "install", "claude", "--permissions")
    place("skill", "uninstall", "claude")
    assert json.loads((place.home / ".claude.json").read_text()) == {
        "numStartups": 3, "mcpServers": {"other": {"command": "x"}},
    }  # fmt: skip
    settings = json.loads((place.home / ".claude/settings.json").read_text())
    assert settings["permissions"]["allow"] == ["Bash(ls)"] and settings["permissions"].get("ask", []) == []
    assert not list(place.home.rglob("SKILL.md"))


def test_a_skill_changed_by_hand_stays(place: Any) -> None:
    place("skill", "install", "claude")
    path = place.home / ".claude/skills/k8e-sandbox/SKILL.md"
    path.write_text(path.read_text().replace("Rules", "My rules"))
    place("skill", "install", "claude")
    assert "My rules" in path.read_text() and "changed by hand" in place.out
    place("skill", "uninstall", "claude")
    assert path.is_file()
    place("skill", "install", "claude", "--force")
    assert "My rules" not in path.read_text()


def test_ak_plugin_install(place: Any, write: Callable[..., Path]) -> None:
    """Install agentkernel's skill, command and entry in the project; its lists when asked; what was there stays."""
    write("project/.mcp.json", '{"mcpServers": {"mine": {"command": "m"}}}')
    write("project/.claude/settings.json", '{"permissions": {"deny": ["mcp__agentkernel__sandbox_run"]}}')
    lines = place("plugin", "install", "claude", "--permissions")
    assert place.code == 0 and {line[0] for line in lines} == {"+", "~"}
    assert place.out.startswith(str(place.project))
    entry = json.loads((place.project / ".mcp.json").read_text())["mcpServers"]
    assert entry["mine"] == {"command": "m"} and entry["agentkernel"]["args"] == ["mcp", "server"]
    assert (place.project / ".claude/skills/agentkernel/SKILL.md").is_file()
    assert (place.project / ".claude/commands/sandbox.md").is_file()
    rules = json.loads((place.project / ".claude/settings.json").read_text())["permissions"]
    assert "mcp__agentkernel__sandbox_list" in rules["allow"] and "mcp__agentkernel__sandbox_remove" in rules["ask"]
    assert "mcp__agentkernel__sandbox_run" not in rules["allow"] + rules["ask"]
    assert not any(place.home.iterdir())
    place("plugin", "install", "open-code")
    assert "exec atoll run" in (place.project / ".opencode/plugins/agentkernel.ts").read_text()
    assert json.loads((place.project / ".opencode/package.json").read_text())["dependencies"]["@opencode-ai/plugin"]


def test_a_project_cannot_send_us_elsewhere(place: Any, write: Callable[..., Path]) -> None:
    """Follow no link of a project to a file outside of it."""
    victim = write("home/.profile", '{"x": 1}')
    (place.project / ".mcp.json").symlink_to(victim)
    (place.project / ".claude/skills/agentkernel").mkdir(parents=True)
    (place.project / ".claude/skills/agentkernel/SKILL.md").symlink_to(victim)
    place("plugin", "install", "claude", "--force")
    assert place.code == 1 and victim.read_text() == '{"x": 1}'


def test_list_shows_what_is_there(place: Any) -> None:
    place("skill", "install", "claude")
    place("plugin", "install", "mcp")
    place("skill", "list", "--json")
    found = {(one["skill"], one["kind"]) for one in json.loads(place.out)["installed"]}
    assert found == {("k8e-sandbox", "skill"), ("k8e-sandbox", "mcp"), ("agentkernel", "mcp")}


def test_an_unknown_target_is_an_error(place: Any) -> None:
    place("skill", "install", "emacs")
    assert place.code != 0 and "claude" in place.out and not any(place.home.iterdir())


def test_everyday_11_start_and_stop_are_allowed(place: Any) -> None:
    place("plugin", "install", "claude", "--permissions")
    rules = json.loads((place.project / ".claude/settings.json").read_text())["permissions"]
    assert {"mcp__agentkernel__sandbox_start", "mcp__agentkernel__sandbox_stop"} <= set(rules["allow"])
    assert rules["ask"] == [f"mcp__agentkernel__sandbox_{verb}" for verb in ("create", "file_write", "remove")]


def test_everyday_11_a_project_of_kiro_is_found(place: Any) -> None:
    (place.project / ".kiro").mkdir()
    place("skill", "install", "auto")
    assert (place.project / ".kiro/skills/k8e-sandbox/SKILL.md").is_file()
    assert "k8e-sandbox" in json.loads((place.project / ".kiro/settings/mcp.json").read_text())["mcpServers"]
    assert not (place.home / ".kiro").exists()
