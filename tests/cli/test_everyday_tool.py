"""A pleasant tool: progress, streams, interrupts, text for people and JSON for programs, one way to name a sandbox."""

import json
import os
import select
import shlex
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from lab.lossy_proxy import LossyProxy
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


def test_everyday_15_run_names_its_runtime_as_every_other_verb_does(cli: Cli) -> None:
    done = cli("run", "--runtime", "container", "--keep", "--memory", "96", "true")
    name = next(word for word in done.stderr.decode().split() if word.startswith("run-"))
    found = cli.ok("sandbox", "get", name)
    assert (found["runtime_class"], found["limits"]["memory_mb"]["value"]) == ("container", 96)
    cli("remove", name)
    wrong = cli("run", "--runtime", "nope", "true")
    assert wrong.code == 125 and b"'nope'" in wrong.stderr and b"gvisor" in wrong.stderr


def test_everyday_15_output_of_many_lines_is_shown_in_lines(cli: Cli, box: str) -> None:
    run = cli.ok("sandbox", "run", "echo one; echo two", "--background", "--session-id", box)["run_id"]
    until(lambda: cli.ok("sandbox", "poll", run)["status"] == "completed", "it never ended")
    code, seen = cli.at_terminal("sandbox", "poll", run)
    assert code == 0 and "stdout       one\n             two\n" in seen, seen


def test_everyday_14_a_command_that_was_left_is_found_again(cli: Cli, box: str) -> None:
    code, seen = cli.at_terminal("exec", "--detach", box, "echo", "left")
    assert code == 0 and f"atoll sandbox exec-logs {box} {seen.split()[0]}" in seen, seen
    until(lambda: b"left" in cli("sandbox", "exec-logs", box, seen.split()[0]).stdout, "nothing to see")


def test_everyday_a_file_that_exec_does_not_read_is_told(cli: Cli, box: str, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("print(6 * 7)\n")
    with script.open("rb") as file:
        done = subprocess.run(
            cli.command("exec", box, "cat"), stdin=file, capture_output=True, env=cli.env, timeout=WAIT
        )
    assert (done.returncode, done.stdout) == (0, b"") and b"exec -i" in done.stderr
    loop = f"while read line; do {shlex.join(cli.command('exec', box, 'echo', 'x'))}; done"
    with script.open("rb") as file:
        done = subprocess.run(["bash", "-c", loop], stdin=file, capture_output=True, env=cli.env, timeout=WAIT)
    assert (done.stdout, done.stderr) == (b"x\n", b""), "a loop's own input is no mistake"
    hint = cli("run", "python3", str(script)).stderr.decode()
    assert f"atoll run python3 - < {script}" in hint
    with script.open("rb") as file:
        done = subprocess.run(
            cli.command("run", "python3", "-"), stdin=file, capture_output=True, env=cli.env, timeout=WAIT
        )
    assert done.stdout == b"42\n"


def test_everyday_15_help_fits_the_terminal(cli: Cli) -> None:
    code, seen = cli.at_terminal("help")
    assert code == 0 and max(map(len, seen.partition("Exit codes")[0].split("\n"))) <= 100, seen
    plain = cli("help").stdout.decode()
    assert " ".join(seen.split()) == " ".join(plain.split()), "the same words, in other lines"


def test_everyday_2_a_named_sandbox_that_has_ended_is_told_as_that(cli: Cli) -> None:
    name = f"short-{os.urandom(4).hex()}"
    cli.ok("sandbox", "create", "--name", name, "--idle-timeout", "1s")
    until(lambda: name not in [one.get("name") for one in cli.ok("sandbox", "list")["sandboxes"]], "it never ended")
    done = cli("exec", name, "true")
    assert f"no sandbox '{name}'".encode() in done.stderr and b"idle timeout" in done.stderr, done
    assert "idle timeout" in cli("sandbox", "get", name).json["detail"]
    assert b"ended" not in cli("exec", f"{name}x", "true").stderr


@pytest.mark.parametrize("words", [("start",), ("prewarm",)])
def test_everyday_32_pinning_is_asked_again_when_its_answer_is_lost(
    fresh: Cli, tmp_path: Path, words: tuple[str, ...]
) -> None:
    """The daemon that pinned itself is replaced before its answer arrives; the next one is asked again."""
    real = fresh.ok("daemon", "status", "--json") if fresh("daemon", "start").code == 0 else {}
    fresh("daemon", "stop")
    assert fresh("list").code == 0, "a daemon that is not pinned"
    front, restarted = tmp_path / "home", threading.Event()
    front.mkdir()

    def restart() -> None:
        until(lambda: fresh.ok("daemon", "status", "--json")["pinned"], "the first request never arrived")
        fresh("daemon", "stop")
        fresh("list")
        restarted.set()

    proxy = LossyProxy(front / "daemon.sock", real["socket"], b"/v1/daemon/pin", restarted)
    threading.Thread(target=restart, daemon=True).start()
    try:
        done = fresh("daemon", *words, env={"ATOLL_HOME": str(front)})
    finally:
        restarted.set()
        proxy.close()
    assert done.code == 0, done
    assert fresh.ok("daemon", "status", "--json")["pinned"] is True


def test_everyday_32_errors_of_files_are_in_words(cli: Cli, box: str) -> None:
    """Of ours: no number of an operating system, and the path that was meant."""
    cli.ok("sandbox", "write", box, "/workspace/plain", stdin=b"x")
    for path, words in (
        ("/workspace", "this is a directory"), ("/workspace/none", "no such file"), ("/workspace/plain/x", "not a directory"),
    ):  # fmt: skip
        detail = cli("sandbox", "read", box, path).json["detail"]
        assert words in detail and path in detail and "os error" not in detail, detail
    denied = cli("sandbox", "write", box, "/proc/version", stdin=b"x").json["detail"]
    assert "os error" not in denied and denied.startswith("/proc/version"), denied


def test_everyday_15_words_of_other_tools_lead_to_ours(cli: Cli) -> None:
    for typed, meant in ((("sandbox", "ports"), "sandbox expose"), (("ports",), "sandbox expose"), (("ls",), "list")):
        assert f"did you mean {meant}".encode() in cli(*typed).stdout + cli(*typed).stderr, typed
