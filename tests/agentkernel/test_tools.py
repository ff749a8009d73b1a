"""Recordings, project files, templates, sessions, pipelines, parallel jobs, other names, images."""

import json
import os
import pty
import select
import subprocess
import time
from pathlib import Path

import pytest

from .conftest import WAIT, Cli
from .test_run import LINKS


def on_terminal(cli: Cli, *words: str, typed: bytes) -> bytes:
    """Run it on a terminal of its own, type, and read everything it shows."""
    master, slave = pty.openpty()
    process = cli.popen(*words, stdin=slave, stdout=slave, stderr=subprocess.DEVNULL)
    os.close(slave)
    shown = b""
    sent = False
    deadline = time.monotonic() + WAIT
    while time.monotonic() < deadline:
        ready, _, _ = select.select([master], [], [], 0.2)
        if ready:
            try:
                piece = os.read(master, 65536)
            except OSError:
                break
            if not piece:
                break
            shown += piece
        if not sent and shown:
            os.write(master, typed)
            sent = True
        if process.poll() is not None and not ready:
            break
    os.close(master)
    assert process.wait(WAIT) == 0, shown
    return shown


def test_ak_K10_a_recording_replays_byte_for_byte(cli: Cli, project: Path, name: str) -> None:
    cli.ok("create", name)
    cli.ok("start", name)
    script = r"printf '\033[31mred\033[0m h\303\251 \377\376 \000 end\r\n'; sleep 0.3; echo done"
    shown = on_terminal(cli, "attach", f"--record={project}/a.cast", name, "sh", "-c", script, typed=b"")
    assert b"\x1b[31mred\x1b[0m h\xc3\xa9 \xff\xfe \x00 end" in shown
    lines = (project / "a.cast").read_text().splitlines()
    head = json.loads(lines[0])
    assert head["version"] == 2 and head["width"] > 0 and head["height"] > 0 and head["timestamp"] > 0
    events = [json.loads(line) for line in lines[1:]]
    assert all(kind == "o" and at >= 0 for at, kind, _ in events)
    assert [at for at, _, _ in events] == sorted(at for at, _, _ in events)
    replayed = cli.ok("replay", "a.cast", "--speed", "100", "--max-idle", "0.1")
    assert replayed.stdout == shown
    assert b"replay of a.cast" in replayed.stderr and b"end of replay" in replayed.stderr


def test_attach_passes_the_shell_and_its_status(cli: Cli, project: Path, name: str) -> None:
    cli.ok("create", name)
    cli.ok("start", name)
    shown = on_terminal(cli, "attach", "--record", name, typed=b"echo $((20+22)); exit\n")
    assert b"42" in shown
    recordings = list((Path(cli.home) / "recordings").glob(f"{name}-*.cast"))
    assert len(recordings) == 1
    assert cli("attach", name, "sh", "-c", "exit 5").code == 5


@pytest.mark.parametrize(
    "text", ["", "{}", '{"version": 1}', '{"version": 2}\nnonsense', '{"version": 2}\n[1, "o"]', "\xff"]
)
def test_broken_recordings_are_refused(cli: Cli, project: Path, text: str) -> None:
    (project / "b.cast").write_bytes(text.encode("latin-1"))
    assert cli("replay", "b.cast").code == 125
    assert cli("replay", "none.cast").code == 125


def test_init_writes_a_file_that_works(cli: Cli, project: Path) -> None:
    (project / "requirements.txt").write_text("")
    cli.ok("init", "--agent", "codex")
    text = (project / "agentkernel.toml").read_text()
    assert 'runtime = "python"' in text and 'compatibility_mode = "codex"' in text and 'name = "project"' in text
    assert cli("init").code == 125
    assert cli("init", "--agent", "clippy").code == 2
    done = cli("run", "sh", "-c", "ls requirements.txt; touch /x")
    assert done.stdout == b"requirements.txt\n" and b"Warning" not in done.stderr, done


def test_templates(cli: Cli, project: Path, name: str) -> None:
    rows = {row["name"]: row for row in cli.ok("template", "list", "--json").json}
    needed = "python python-ml node node-fullstack typescript rust rust-ci go ruby java dotnet bash c secure"
    assert set(needed.split()) | {"claude-sandbox", "codex-sandbox", "gemini-sandbox"} <= set(rows)
    done = cli(
        "run",
        "--template",
        "secure",
        "sh",
        "-c",
        f"{LINKS}; touch /x",
    )
    assert done.stdout == b"lo\n" and b"Read-only" in done.stderr, done
    own = "tpl" + name
    (project / "t.toml").write_text(f'[sandbox]\nname = "{own}"\n[resources]\nmemory_mb = 200\n')
    try:
        cli.ok("template", "add", "t.toml")
        assert "memory_mb = 200" in cli.ok("template", "show", own).text
        cli.ok("create", name, "--template", own)
        assert cli.ok("sandbox", "info", name).json["limits"]["memory_mb"]["value"] == 200
        cli.ok("template", "save", own + "2", "--from", name)
        assert "memory_mb = 200" in cli.ok("template", "show", own + "2").text
        assert cli("template", "add", "t.toml", "python").code == 125
        assert cli("template", "show", "pythn").code == 125
    finally:
        cli("template", "remove", own)
        cli("template", "remove", own + "2")
    assert cli("template", "remove", own).code == 125
    assert cli("template", "remove", "python").code == 125


def test_sessions(cli: Cli, project: Path, name: str) -> None:
    (project / "f").write_text("s\n")
    cli.ok("session", "start", "--name", name, "--agent", "gemini")
    try:
        assert cli.ok("exec", f"session-{name}", "cat", "f").stdout == b"s\n"
        (row,) = [row for row in cli.ok("session", "list", "--json").json if row["name"] == name]
        assert row == {"name": name, "agent": "gemini", "status": "running", "sandbox": f"session-{name}"}
        cli.ok("exec", f"session-{name}", "sh", "-c", "echo x > /root/state")
        cli.ok("session", "stop", name)
        assert cli("session", "start", "--name", name).code == 125
        cli.ok("session", "resume", name)
        assert cli.ok("exec", f"session-{name}", "cat", "/root/state").stdout == b"x\n"
        cli.ok("session", "save", name)
        assert [row["status"] for row in cli.ok("session", "list", "--json").json if row["name"] == name] == ["saved"]
        cli.ok("snapshot", "delete", f"session-{name}")
    finally:
        cli.ok("session", "delete", name)
    assert cli("session", "start").code == 2


def test_snapshots(cli: Cli, name: str) -> None:
    cli.ok("create", name, "--memory", "300", "--profile", "restrictive", "--config", _empty(cli))
    cli.ok("start", name)
    cli.ok("exec", name, "sh", "-c", "echo kept > /workspace/f")
    cli.ok("snapshot", "take", name, "--name", f"{name}-s")
    try:
        (row,) = [row for row in cli.ok("snapshot", "list", "--json").json if row["name"] == f"{name}-s"]
        assert row["sandbox"] == name
        cli.ok("snapshot", "restore", f"{name}-s", "--as", f"{name}r")
        info = cli.ok("sandbox", "info", f"{name}r").json
        assert info["limits"]["memory_mb"]["value"] == 300 and info["policy"]["isolation"]["profile"] == "restrictive"
        assert cli.ok("exec", f"{name}r", "cat", "/workspace/f").stdout == b"kept\n"
    finally:
        cli("remove", f"{name}r")
        cli.ok("snapshot", "delete", f"{name}-s")
    assert cli("snapshot", "restore", f"{name}-s").code == 125


def _empty(cli: Cli) -> str:
    path = Path(cli.directory, "empty.toml")
    path.write_text("")
    return str(path)


def test_pipelines(cli: Cli, project: Path) -> None:
    (project / "p.toml").write_text(
        """
        [[step]]
        name = "make"
        image = "host"
        command = "sh -c 'mkdir -p /out/d; echo made > /out/d/f'"
        output = "/out"
        [[step]]
        name = "use"
        image = "host"
        command = "sh -c 'cat /in/d/f; cp /in/d/f /next/'"
        input = "/in"
        output = "/next"
        [[step]]
        name = "check"
        image = "host"
        command = "cat /x/f"
        input = "/x"
        """
    )
    lines = cli.ok("pipeline", "p.toml").text.splitlines()
    assert [line.partition(" done")[0] for line in lines] == [
        "[1/3] make",
        "made",
        "[2/3] use",
        "made",
        "[3/3] check",
        "3 steps",
    ]
    (project / "f.toml").write_text(
        '[[step]]\nname = "a"\nimage = "host"\ncommand = "sh -c \'exit 9\'"\n'
        '[[step]]\nname = "b"\nimage = "host"\ncommand = "echo never"\n'
    )
    failed = cli("pipeline", "f.toml")
    assert failed.code == 9 and b"never" not in failed.stdout
    assert not [n for n in cli.names() if len(n) == 20]  # nothing without a name is left


@pytest.mark.parametrize(
    "text",
    [
        "",
        '[[step]]\nname = "a/b"\nimage = "host"\ncommand = "x"\n',
        '[[step]]\nname = ".."\nimage = "host"\ncommand = "x"\n',
        '[[step]]\nname = "a"\nimage = "host"\ncommand = ""\n',
        '[[step]]\nname = "a"\nimage = "host"\ncommand = "\'"\n',
        '[[step]]\nname = "a"\ncommand = "x"\ninput = "rel"\n',
        '[[step]]\nname = "a"\ncommand = "x"\n[[step]]\nname = "a"\ncommand = "x"\n',
        '[[step]]\nname = "a"\ncommand = "x"\nflavour = "y"\n',
        "nonsense",
    ],
)
def test_bad_pipelines_are_refused(cli: Cli, project: Path, text: str) -> None:
    (project / "bad.toml").write_text(text)
    done = cli("pipeline", "bad.toml")
    assert done.code == 125 and not done.stdout


def test_parallel_jobs(cli: Cli) -> None:
    done = cli.ok("parallel", "-j", "a:host:echo one", "-j", "b:host:sh -c 'echo two'")
    assert sorted(done.text.split()) == sorted(["[a]", "done", "one", "[b]", "done", "two"])
    failed = cli("parallel", "-j", "good:host:true", "-j", "bad:host:sh -c 'exit 3'")
    assert failed.code == 1 and b"[bad] failed with 3" in failed.stdout
    assert cli("parallel").code == 2 and cli("parallel", "-j", "nonsense").code == 2


def test_other_names(cli: Cli, tmp_path: Path) -> None:
    program = tmp_path / "bin" / "atoll"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    other = tmp_path / "other"
    other.mkdir()
    from atoll.surfaces.agentkernel.cli import alias

    def call(verb: str, *words: str) -> int:
        code = f"import sys; sys.argv[0] = {str(program)!r}; from atoll.cli import main; sys.exit(main(['alias', *sys.argv[1:]]))"
        command = [cli.command()[0], "-c", code, verb, *words]
        return subprocess.run(command, env=cli.env, capture_output=True, timeout=WAIT).returncode

    assert call("install", "agentkernel", str(other)) == 0
    assert os.readlink(other / "agentkernel") == str(program)
    assert call("install", "agentkernel", str(other)) == 0
    (other / "k8e").write_text("mine")
    assert call("install", "k8e", str(other)) == 125 and (other / "k8e").read_text() == "mine"
    assert call("remove", "k8e", str(other)) == 125
    assert call("install", "rm", str(other)) == 2
    assert call("remove", "agentkernel", str(other)) == 0 and not (other / "agentkernel").exists()
    assert "agentkernel" in alias.NAMES


def test_images(cli: Cli) -> None:
    assert cli.ok("image", "inspect", "host").json["source"] == "host"
    listed = cli.ok("image", "list", "--json").json
    assert "python" in [entry["name"] for entry in listed["catalog"]]
    assert cli("image", "inspect", "nosuch").code == 125
    assert cli("image", "rm", "nosuch").code == 125
    assert cli("image", "pull", "localhost:1/no/such:image").code == 125
    assert cli("image", "build", "Bad Name", "--debian", "git").code == 125
    assert cli("image", "build", "x").code == 125
    assert "layers" in cli.ok("image", "prune", "--json").json


def test_agents_and_status_words(cli: Cli) -> None:
    rows = cli.ok("agents", "--json", env={"OPENAI_API_KEY": "x"}).json
    assert {row["agent"]: row["key"] for row in rows}["codex"] is True
    assert cli.ok("agents").text.split()[:4] == ["AGENT", "STATUS", "API", "KEY"]
