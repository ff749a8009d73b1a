"""A pleasant tool: progress, streams, interrupts, text for people and JSON for programs, one way to name a sandbox."""

import json
import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from lab.waiting import until

from .conftest import WAIT, Cli

SLOW_BUILDER = """#!/bin/sh
echo 'I: installing packages' >&2
sleep 4
echo 'I: still at it' >&2
exec tar -C "$(dirname "$0")/tree" -cf - .
"""


@pytest.fixture
def slow_images(fresh: Cli, tmp_path: Path) -> Cli:
    """A machine where the Debian set of an image takes some seconds to build, and no registry answers."""
    tree = tmp_path / "bin" / "tree"
    for name in ("bin", "etc", "usr/bin", "workspace", "tmp", "proc", "dev", "sys", "run"):
        (tree / name).mkdir(parents=True)
    builder = tmp_path / "bin" / "mmdebstrap"
    builder.write_text(SLOW_BUILDER)
    builder.chmod(0o755)
    fresh.env["PATH"] = f"{builder.parent}:{fresh.env['PATH']}"
    return fresh


def test_everyday_13_a_build_inside_run_shows_its_progress(slow_images: Cli) -> None:
    """Piped: a line now and then on stderr, also for `sandbox create`; the build may fail to give a working image."""
    for words in (("run", "--image", "lua", "true"), ("sandbox", "create", "--image", "elixir")):
        done = slow_images(*words)
        lines = [
            line for line in done.stderr.decode().splitlines() if line.startswith(("build", "download", "resolve"))
        ]
        assert any("installing packages" in line for line in lines), done
        assert len(lines) < 20 and b"\x1b" not in done.stderr


def test_everyday_14_poll_follow_streams_while_the_command_runs(cli: Cli, box: str) -> None:
    gate = f"/workspace/go-{os.urandom(3).hex()}"
    code = f"echo first; while [ ! -e {gate} ]; do sleep 0.1; done; echo last; exit 4"
    run = cli.ok("sandbox", "run", code, "--background", "--session-id", box)["run_id"]
    process = cli.popen("sandbox", "poll", run, "--follow", "--raw", stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"first\n", "before its end"
    cli.ok("sandbox", "write", box, gate, stdin=b"")
    assert process.stdout.read() == b"last\n" and process.wait(WAIT) == 4
    ended = cli("sandbox", "poll", run, "--follow")
    assert ended.json["stdout"] == "first\nlast\n" and ended.json["exit_code"] == 4
    assert ended.stderr == b"first\nlast\n", "standard output has the JSON"


TRAPPING = "trap 'echo caught; exit 9' INT; echo ready; while :; do sleep 0.1; done"
STUBBORN = "trap 'echo no' INT; echo ready; while :; do sleep 0.1; done"


@pytest.mark.parametrize("words", [("exec", "{box}"), ("run",)])
def test_everyday_14_ctrl_c_reaches_the_program_and_a_second_one_ends_it(
    cli: Cli, box: str, words: tuple[str, ...]
) -> None:
    named = tuple(word.format(box=box) for word in words)
    process = cli.popen(*named, "sh", "-c", TRAPPING, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL)
    assert process.stdout is not None and process.stdout.readline() == b"ready\n"
    process.send_signal(signal.SIGINT)
    assert process.stdout.read() == b"caught\n" and process.wait(WAIT) == 9
    process = cli.popen(*named, "sh", "-c", STUBBORN, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL)
    assert process.stdout is not None and process.stdout.readline() == b"ready\n"
    process.send_signal(signal.SIGINT)
    assert process.stdout.readline() == b"no\n" and process.poll() is None
    process.send_signal(signal.SIGINT)
    assert process.wait(WAIT) == 130
    until(lambda: "no" not in cli("exec", box, "sh", "-c", "pgrep -f 'echo [n]o' || true").stdout.decode(), "left over")


def test_everyday_15_a_person_gets_text_and_a_program_json(cli: Cli, box: str) -> None:
    cli.ok("sandbox", "write", box, "/workspace/text", stdin=b"some text\n")
    verbs = [
        ("sandbox", "status"), ("sandbox", "list"), ("sandbox", "sessions"), ("sandbox", "get", box), ("list",),
        ("sandbox", "list", box), ("sandbox", "ps", box), ("sandbox", "events", box), ("sandbox", "exposed", box),
        ("sandbox", "read", box, "/workspace/text"), ("sandbox", "snapshot", "list"), ("sandbox", "approvals"),
        ("sandbox", "allow-hosts", box), ("sandbox", "info", box), ("sandbox", "run", "echo 1", "--session-id", box),
        ("daemon", "status"), ("config", "show"), ("image", "list"), ("secret", "list"), ("version",), ("agents",),
        ("template", "list"), ("key", "list"), ("skill", "list"),
    ]  # fmt: skip
    for words in verbs:
        code, seen = cli.at_terminal(*words)
        assert code == 0 and not seen.lstrip().startswith("{"), (words, seen)
        assert "{'" not in seen and "': " not in seen and "True" not in seen, (words, seen)
        code, seen = cli.at_terminal(*words, "--json")
        assert code == 0, (words, seen)
        json.loads(seen)
        piped = cli(*words, "--json")
        assert piped.code == 0, (words, piped)
        json.loads(piped.stdout)
        if words[0] == "sandbox":
            json.loads(cli(*words).stdout)


def test_everyday_15_a_person_gets_an_error_in_words(cli: Cli) -> None:
    code, seen = cli.at_terminal("sandbox", "get", "nobody")
    assert code == 1 and seen.startswith("atoll: no sandbox 'nobody'"), seen
    assert cli("sandbox", "get", "nobody").json["error"] == "not_found"
    failed = cli("--json", "exec", "nobody", "true")
    assert failed.code == 125 and failed.json["error"] == "not_found"


def test_everyday_15_every_verb_takes_the_sandbox_first_or_by_flag(cli: Cli, box: str) -> None:
    path = "/workspace/named"
    cli.ok("sandbox", "write", "--session-id", box, path, stdin=b"x")
    both = [
        (("sandbox", "get"), ()), (("sandbox", "read"), (path,)), (("sandbox", "list"), ()), (("sandbox", "ps"), ()),
        (("sandbox", "exposed"), ()), (("sandbox", "allow-hosts"), ()), (("sandbox", "info"), ()),
    ]  # fmt: skip
    for verb, rest in both:
        first, flag = cli(*verb, box, *rest), cli(*verb, *rest, "--session-id", box)
        assert first.code == flag.code == 0 and first.json.keys() == flag.json.keys(), (verb, first, flag)
    assert cli("exec", "--session-id", box, "echo", "--json").stdout == b"--json\n"
    added = cli.ok("sandbox", "allow-hosts", box, "one.example", "--add")["allowed_hosts"]
    assert "one.example" in added and "pypi.org" in added
    url = cli.ok("sandbox", "expose", box, "8000")
    assert url["session_id"] == box and cli.ok("sandbox", "unexpose", box, "8000")["ok"] is True


def test_everyday_15_one_list_and_one_spelling_of_ids(cli: Cli, box: str) -> None:
    text = cli("list").stdout.decode()
    assert box in text and f" {box.removeprefix('sess-')}" not in text
    assert json.loads(cli("list", "--json").stdout) == json.loads(cli("sandbox", "list").stdout)


def test_everyday_16_remove_takes_many_and_tells_of_what_is_not_there(cli: Cli) -> None:
    made = [cli.ok("sandbox", "create")["session_id"] for _ in range(2)]
    done = cli("remove", *made)
    assert done.code == 0 and done.stdout.count(b"removed") == 2
    assert cli("remove", "nope").code == 125 and b"--force" in cli("remove", "nope").stderr
    assert cli("remove", "nope", "--force").code == 0
    lenient = "import sys; sys.argv[0] = '/usr/bin/agentkernel'; from atoll.cli import main; sys.exit(main())"
    called = subprocess.run([sys.executable, "-c", lenient, "remove", "nope"], env=cli.env, capture_output=True)
    assert called.returncode == 0 and b"nothing to remove" in called.stdout, "as its contract has it"


def test_everyday_16_skill_install_leaves_the_project_alone(cli: Cli, tmp_path: Path) -> None:
    home, project = tmp_path / "home", tmp_path / "project"
    for folder in (".claude", ".codex", ".kiro"):
        (project / folder).mkdir(parents=True)
    home.mkdir()
    before = sorted(project.rglob("*"))

    def install(*words: str) -> None:
        done = subprocess.run(
            cli.command("skill", "install", *words),
            env={**cli.env, "HOME": str(home)},
            cwd=project,
            capture_output=True,
        )
        assert done.returncode == 0, done

    for target in ("claude", "codex", "mcp", "gemini"):
        install(target)
        assert sorted(project.rglob("*")) == before, target
    install("kiro")  # its contract: the project's folder where there is one
    assert (project / ".kiro/skills/k8e-sandbox/SKILL.md").is_file()
    install("claude", "--project")
    assert (project / ".claude/skills/k8e-sandbox/SKILL.md").is_file()


def test_everyday_the_daemon_keeps_nothing_of_its_first_caller(fresh: Cli) -> None:
    """A descriptor the caller had open, such as a script's lock, is not held for as long as the daemon lives."""
    reading, writing = os.pipe()
    try:
        process = fresh.popen("sandbox", "status", stdout=subprocess.DEVNULL, pass_fds=(writing,))
    finally:
        os.close(writing)
    assert process.wait(WAIT) == 0
    assert select.select([reading], [], [], 10.0)[0], "somebody still has the other end"
    assert os.read(reading, 1) == b""
    os.close(reading)
