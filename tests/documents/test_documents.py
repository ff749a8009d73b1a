"""The documents are true: what they name exists, what they type is understood, and the first session of the README runs."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from lab.sandboxes import PATIENCE, Lab

from atoll.cli import SHARED, find
from atoll.cli.grammar import UsageError, parse

ROOT = Path(__file__).parents[2]
PAGES = sorted((*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")))
TOPS = ("tests/", "src/", "docs/", "guest/", "launcher/", "scripts/", "bench/", "sdk/", "proto/")
MADE = ("bench/results",)  # only after a run
README = (ROOT / "README.md").read_text()
CHANGING = {"session_id", "duration_ms", "runtime_class"}


def named_paths(page: Path) -> list[str]:
    found = [*re.findall(r"`([\w./-]+)`", page.read_text()), *re.findall(r"\]\(([\w./-]+)\)", page.read_text())]
    return [name for name in found if name.startswith(TOPS) or re.fullmatch(r"[A-Z]+\.md", name)]


def typed_commands(page: Path) -> list[str]:
    text = page.read_text()
    blocks = "\n".join(re.findall(r"```\w*\n(.*?)```", text, re.DOTALL))
    lines = re.findall(r"^(?:\$ )?(atoll .*)$", blocks, re.MULTILINE)
    return [*lines, *re.findall(r"`(atoll [^`]+)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL))]


@pytest.mark.parametrize("page", PAGES, ids=[str(page.relative_to(ROOT)) for page in PAGES])
def test_every_path_named_exists(page: Path) -> None:
    """A claim without its test is no claim, and a pointer to nothing no pointer."""
    named = named_paths(page)
    assert page.name != "SECURITY.md" or len(named) > 50
    assert [name for name in named if not (ROOT / name).exists() and not name.startswith(MADE)] == []


def test_everyday_17_the_readme_leads_to_every_guide() -> None:
    """Every page that the site's navigation has for a person who wants to do something."""
    navigation = (ROOT / "mkdocs.yml").read_text().partition("nav:")[2].partition("- Compatibility:")[0]
    guides = {f"docs/{name}" for name in re.findall(r": ([a-z0-9-]+\.md)$", navigation, re.M)} - {"docs/index.md"}
    assert len(guides) > 10
    assert {guide for guide in guides if f"`{guide}`" not in README} == set()


def test_every_line_of_everyday_use_has_a_test(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    import compat_everyday

    assert set(compat_everyday.LINES) == set(compat_everyday.found_tests())


@pytest.mark.parametrize("page", PAGES, ids=[str(page.relative_to(ROOT)) for page in PAGES])
def test_every_command_typed_is_understood(page: Path) -> None:
    """Each has a verb there is, with flags it takes. `a|b`, `[x]` and `...` stand for a choice."""
    for command in typed_commands(page):
        plain = re.sub(r"[\[\]]|\.\.\.", " ", command.partition(" <")[0].partition("; echo")[0])
        words = [word.partition("|")[0] for word in shlex.split(plain, comments=True)][1:]
        try:
            verb, rest, moved = find(words)
            if verb is not None and words[-1] != "help":
                parse(verb, [*moved, *rest], SHARED)
        except UsageError as bad:
            missing = "needs" in bad.message or "missing" in bad.message  # a verb that is only named
            assert missing, f"{page.name}: {command}: {bad.message}"


def test_the_first_session_runs_as_it_is_shown(own_lab: Lab, tmp_path: Path) -> None:
    """Type what the README types, in order, in a fresh home; see what it shows."""
    program = tmp_path / "atoll"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m atoll "$@"\n')
    program.chmod(0o755)
    env = {**own_lab.env, "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}", "ATOLL_RUNTIME": "container"}
    steps = re.findall(r"^\$ (.+)\n((?:(?!\$ ).+\n)*)", re.findall(r"```console\n(.*?)```", README, re.DOTALL)[0], re.M)
    assert len(steps) >= 5
    for command, shown in steps:
        done = subprocess.run(
            ["bash", "-c", command], cwd=tmp_path, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            text=True, timeout=2 * PATIENCE,
        )  # fmt: skip
        assert sorted(map(steady, done.stdout.splitlines())) == sorted(map(steady, shown.splitlines())), command


def test_the_python_of_the_readme_runs(lab: Lab) -> None:
    """But for the package, which would need a network."""
    code = re.findall(r"```python\n(.*?)```", README, re.DOTALL)[0].replace("pip install six", "echo six")
    done = subprocess.run(
        [sys.executable, "-c", code], env={**lab.env, "ATOLL_RUNTIME": "container"}, capture_output=True, text=True,
        timeout=2 * PATIENCE,
    )  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr) == (0, "42\n\n", "")


@pytest.mark.parametrize("runtime", ["container", "gvisor"])
def test_k8e_P29_the_time_to_start_is_published_for_each_runtime(runtime: str) -> None:
    """Measured on the machine the page names, beside the bare engine in the same run."""
    page = (ROOT / "docs/performance.md").read_text()
    rows = page.partition(f"| **create and first command, {runtime}** |")[2].partition("| **")[0]
    times = dict(re.findall(r"^\| ([\w ,]+?) \| ([\d.,]+) ms \|", rows, re.M))
    assert any(name.startswith("atoll") for name in times) and len(times) >= 2, rows


def test_k8e_P52_make_says_what_it_can_do_and_the_licence_is_apache() -> None:
    shown = subprocess.run(["make", "--no-print-directory"], cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE)
    assert shown.returncode == 0 and {"setup", "test"} <= {line.split()[0] for line in shown.stdout.splitlines()}
    licence = (ROOT / "LICENSE").read_text()
    assert "Apache License" in licence and "Version 2.0" in licence
    assert "report it privately" in (ROOT / "SECURITY.md").read_text()


def steady(line: str) -> str:
    """A line without what differs from run to run."""
    if not line.startswith("{"):
        return line
    return json.dumps({key: None if key in CHANGING else value for key, value in json.loads(line).items()})
