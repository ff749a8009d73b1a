"""The official conformance suite (npm `@modelcontextprotocol/conformance`): every server scenario is run or has its reason."""

import fcntl
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from lab.sandboxes import PATIENCE, Lab

VERSION = "0.1.13"  # the newest that runs on Node 20
OURS = (
    "server-initialize", "ping", "tools-list", "tools-call-error", "server-sse-multiple-streams", "dns-rebinding-protection",
)  # fmt: skip
# Scenarios that call tools of fixed names: the same server with a table of those tools.
WITH_THEIR_TOOLS = (
    *OURS, "tools-call-simple-text", "tools-call-image", "tools-call-audio", "tools-call-embedded-resource",
    "tools-call-mixed-content", "tools-call-with-progress", "json-schema-2020-12",
)  # fmt: skip
_NOT_OFFERED = "a capability this server does not declare"
_MODEL = "the server never asks the client's model or person: what needs a person is approved outside of MCP"
NOT_RUN = {
    "logging-set-level": _NOT_OFFERED,
    "tools-call-with-logging": _NOT_OFFERED + "; live output comes as progress",
    "completion-complete": _NOT_OFFERED,
    "tools-call-sampling": _MODEL,
    "tools-call-elicitation": _MODEL,
    "elicitation-sep1034-defaults": _MODEL,
    "elicitation-sep1330-enums": _MODEL,
    "server-sse-polling": "a call whose connection is gone is killed, so there is nothing to come back to",
    **dict.fromkeys(
        (
            "resources-list", "resources-read-text", "resources-read-binary", "resources-templates-read",
            "resources-subscribe", "resources-unsubscribe", "prompts-list", "prompts-get-simple", "prompts-get-with-args",
            "prompts-get-embedded-resource", "prompts-get-with-image",
        ),
        _NOT_OFFERED,
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def suite() -> str:
    """The program of the official suite, from a directory that is kept between runs."""
    if shutil.which("npm") is None:
        pytest.skip("npm is not installed")
    directory = Path(tempfile.gettempdir()) / f"atoll-mcp-conformance-{VERSION}-{os.getuid()}"
    program = directory / "node_modules" / ".bin" / "conformance"
    directory.mkdir(mode=0o700, exist_ok=True)
    with (directory / "lock").open("w") as lock:  # test processes side by side
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (directory / "complete").exists():
            package = f"@modelcontextprotocol/conformance@{VERSION}"
            words = ["npm", "install", "--silent", "--no-audit", "--no-fund", "--prefix", str(directory), package]
            try:
                done = subprocess.run(words, capture_output=True, timeout=300)
            except subprocess.TimeoutExpired:
                pytest.skip("the conformance suite could not be fetched in time")
            if done.returncode or subprocess.run([program, "--version"], capture_output=True, timeout=60).returncode:
                pytest.skip("the conformance suite could not be fetched, or does not run here")
            (directory / "complete").touch()
    return str(program)


@pytest.fixture(scope="module")
def their_tools(lab: Lab, tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """The port of our server with the suite's own tools."""
    program, directory = Path(__file__).with_name("conformance_server.py"), tmp_path_factory.mktemp("keys")
    process = subprocess.Popen(
        [sys.executable, str(program), str(directory)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=lab.env
    )
    assert process.stdin is not None and process.stdout is not None
    yield int(process.stdout.readline())
    process.stdin.close()
    process.wait(PATIENCE)


def check(suite: str, port: int, scenario: str, directory: Path) -> None:
    words = [suite, "server", "--url", f"http://localhost:{port}/mcp", "--scenario", scenario]
    done = subprocess.run(words, capture_output=True, text=True, timeout=2 * PATIENCE, cwd=directory)
    assert done.returncode == 0 and ", 0 failed" in done.stdout, done.stdout[-3000:] + done.stderr[-2000:]


def test_every_scenario_is_run_or_has_its_reason(suite: str) -> None:
    listed = subprocess.run([suite, "list"], capture_output=True, text=True, timeout=60, check=True).stdout
    servers = listed.partition("Client scenarios")[0]
    names = {line.strip()[2:] for line in servers.splitlines() if line.strip().startswith("- ")}
    assert names == {*WITH_THEIR_TOOLS, *NOT_RUN} and not {*WITH_THEIR_TOOLS} & {*NOT_RUN}


@pytest.mark.parametrize("scenario", OURS)
def test_conformance(door: Any, suite: str, scenario: str, tmp_path: Path) -> None:
    """Pass, as people start it, the scenarios that need no tools of the suite's own."""
    check(suite, door.port, scenario, tmp_path)


@pytest.mark.parametrize("scenario", [name for name in WITH_THEIR_TOOLS if name not in OURS or "error" in name])
def test_conformance_with_the_suites_tools(their_tools: int, suite: str, scenario: str, tmp_path: Path) -> None:
    check(suite, their_tools, scenario, tmp_path)
