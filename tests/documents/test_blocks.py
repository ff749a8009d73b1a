"""Every block of README and docs that can be run is run as it stands; settings are read by the parser that reads them for the daemon."""

import re
import textwrap
from pathlib import Path

import pytest

from atoll import config

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted(ROOT.glob("docs/**/*.md"))]
DESCRIBED = {"docs/contracts.md"}  # its blocks are signatures and tables, not programs


def blocks(kind: str) -> list[tuple[str, str]]:
    """Page and text of each fenced block of a kind."""
    found = []
    for page in PAGES:
        name = str(page.relative_to(ROOT))
        if name not in DESCRIBED:
            fenced = re.findall(r"^```(\w*)\n(.*?)^```$", page.read_text(), re.M | re.S)
            found += [(name, text) for language, text in fenced if language == kind]
    return found


def page(name: str) -> str:
    return (ROOT / name).read_text()


@pytest.mark.parametrize(("name", "text"), blocks("toml"), ids=[f"{n}-{i}" for i, (n, _) in enumerate(blocks("toml"))])
def test_settings_are_understood(name: str, text: str, tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text(text)
    config.load(tmp_path)


@pytest.mark.parametrize(
    ("name", "code"), blocks("python"), ids=[f"{n}-{i}" for i, (n, _) in enumerate(blocks("python"))]
)
def test_python_runs(typed, name: str, code: str) -> None:
    """To its end, and prints what it says; but for a package, which would need a network."""
    said = {"6 * 7": ("42\n",), "export A=1": ("/tmp\n1\n", "True False\n"), "join_pty": ("0 0\n",)}
    shown = next((texts for mark, texts in said.items() if mark in code), ())
    typed(f"python3 - <<'EOF'\n{code.replace('pip install six', 'echo six')}\nEOF", shown)


def test_allow_hosts_of_the_network_page(typed) -> None:
    [block] = [
        text for name, text in blocks("") if name == "docs/network.md" and "allow-hosts" in text and "$ID" in text
    ]
    script = "ID=$(atoll sandbox create | jq -r .session_id)\n" + block + "atoll sandbox destroy $ID"
    typed(script, ("example.com", '"session_id"', "pypi.org", '"allowed_hosts":[]', '"ok":true'))


def test_the_manifest_of_the_workspaces_page(typed, shell) -> None:
    """But for the repository, which would need a network."""
    text = textwrap.dedent(re.findall(r"^    entries:\n(?:      .*\n)+", page("docs/workspaces.md"), re.M)[0])
    (shell.project / "m.yaml").write_text("".join(line for line in text.splitlines(True) if "gitRepo" not in line))
    script = """ID=$(atoll sandbox create --manifest m.yaml | jq -r .session_id)
atoll exec $ID stat -c '%a %n' /workspace/data /workspace/bin/run.sh
atoll sandbox destroy $ID"""
    typed(script, ("755 /workspace/data\n755 /workspace/bin/run.sh\n",))


def test_the_skill_block_of_the_agents_page(typed, tmp_path: Path) -> None:
    [block] = [text for name, text in blocks("bash") if name == "docs/agents.md" and "skill install" in text]
    home = tmp_path / "home"
    home.mkdir()
    typed(f"export HOME={home}; cd {tmp_path}; set -e\n{block}", ("SKILL.md", ".mcp.json", "SKILL.md"))
    assert "http://127.0.0.1:8811/mcp" in (home / ".claude.json").read_text()


@pytest.mark.parametrize(("words", "tools"), [("mcp", 12), ("mcp server", 9)])
def test_the_servers_of_the_agents_page(typed, words: str, tools: int) -> None:
    assert f"\natoll {words} " in page("docs/agents.md")
    listing = """printf '%s\\n' '{"jsonrpc":"2.0","id":1,"method":"tools/list"}'"""
    count = "jq '[.result.tools[].name | select(test(\"shell\") | not)] | length'"
    typed(f"{listing} | atoll {words} | {count}", (f"{tools}\n",))


def test_the_calls_of_the_iii_page(typed, shell) -> None:
    lines = re.findall(r"^    (atoll fn .*|curl .*)$", page("docs/compat/iii.md"), re.M)
    assert len(lines) == 2
    (shell.home / ".atoll" / "iii.yaml").write_text('{"isolation": "container", "image_allowlist": ["python", "node"]}')
    typed("\n".join(lines), ('"stdout":"1\\n"', '"sandboxes":'))


def test_the_wishes_of_the_readme(typed) -> None:
    """Each line of the table "You want | Type" that ends by itself."""
    rows = re.findall(r"^\| [^|]+ \| .*$", page("README.md"), re.M)
    typed_there = {command for row in rows for command in re.findall(r"`(atoll [^`]+)`", row)}
    ends = {
        "atoll sandbox allow-hosts --add example.com --session-id demo": "example.com",
        "atoll egress log": "",
        "atoll doctor": "kernel",
        "atoll help": "Usage:",
        "atoll help --all": "Usage:",
    }
    assert set(ends) <= typed_there, typed_there
    script = "atoll sandbox create --name demo > /dev/null\n" + "\n".join(ends) + "\natoll sandbox destroy demo"
    typed(script, tuple(filter(None, ends.values())))
