"""The daemon from outside: started once, seen, stopped, killed; what a client then says."""

import json
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from .conftest import WAIT, Cli


def gone(pid: int) -> bool:
    """Whether it has ended with all its threads: the last of them closes its sockets."""
    try:
        is_dead = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
        return is_dead and len(os.listdir(f"/proc/{pid}/task")) == 1
    except OSError:
        return True


def wait_until_gone(pid: int) -> None:
    until = time.monotonic() + 60
    while not gone(pid):
        assert time.monotonic() < until
        time.sleep(0.05)


def test_start_status_stop(fresh: Cli) -> None:
    assert fresh.ok("daemon", "status", "--json")["running"] is False
    assert b"not running" in fresh("daemon", "status").stdout
    assert fresh("daemon", "stop").code == 125
    assert fresh("daemon", "start").code == 0
    status = fresh.ok("daemon", "status", "--json")
    assert status["running"] is True and not gone(status["pid"])
    assert fresh("daemon", "start").code == 0
    assert fresh.ok("daemon", "status", "--json")["pid"] == status["pid"]
    assert fresh("daemon", "stop").code == 0
    assert gone(status["pid"])
    assert fresh.ok("daemon", "status", "--json")["running"] is False


def test_a_sandbox_survives_its_daemon(fresh: Cli) -> None:
    """kill -9: the next call starts a daemon that finds the sandbox and its files."""
    first = fresh.ok("sandbox", "run", "echo kept > f")
    pid = fresh.ok("daemon", "status", "--json")["pid"]
    os.kill(pid, signal.SIGKILL)
    wait_until_gone(pid)
    second = fresh.ok("sandbox", "run", "cat f")
    assert second["stdout"] == "kept\n" and second["session_id"] == first["session_id"]


def test_k8e_D03_a_daemon_that_dies_in_the_middle_is_told_as_it_is(fresh: Cli) -> None:
    """The answer is lost: outcome unknown with the command's id, and the command has run exactly once."""
    session = fresh.ok("sandbox", "create")["session_id"]
    run = fresh.popen("sandbox", "run", "echo x >> /workspace/count; sleep 3; echo end >> /workspace/count",
                      "--session-id", session, stdout=subprocess.PIPE)  # fmt: skip
    until = time.monotonic() + WAIT
    while fresh("sandbox", "read", session, "/workspace/count", "--raw").stdout != b"x\n":
        assert time.monotonic() < until
    pid = fresh.ok("daemon", "status", "--json")["pid"]
    os.kill(pid, signal.SIGKILL)
    out, _ = run.communicate(timeout=WAIT)
    answer = json.loads(out)
    assert run.returncode == 1 and answer["error"] == "outcome_unknown" and answer["retry"] == "never"
    command = answer["details"]["command_id"]
    wait_until_gone(pid)
    ended = fresh.ok("sandbox", "poll", f"{session}-bg-{command}", "--follow")
    assert (ended["status"], ended["exit_code"]) == ("completed", 0), ended
    assert fresh("sandbox", "read", session, "/workspace/count", "--raw").stdout == b"x\nend\n"


def test_k8e_P26_no_service_is_exit_2(cli: Cli, tmp_path: Path) -> None:
    for words in (["sandbox", "run", "echo x"], ["sandbox", "list"], ["sandbox", "get", "x"]):
        done = cli(*words, "--endpoint", f"unix:{tmp_path}/none.sock")
        assert done.code == 2 and done.json["error"] == "daemon_unreachable" and done.json["detail"], done
    status = cli("sandbox", "status", env={"ATOLL_ENDPOINT": f"unix:{tmp_path}/none.sock"})
    assert status.code == 2 and status.json["available"] is False and status.json["error"]
    assert cli("sandbox", "list", "--endpoint", "203.0.113.1:50051").code == 2
    assert cli("exec", "--endpoint", f"unix:{tmp_path}/none.sock", "x", "true").code == 125


def test_a_daemon_that_cannot_start_says_why(fresh: Cli) -> None:
    Path(fresh.home, "config.toml").write_text("this is not = = toml\n")
    done = fresh("sandbox", "list")
    assert done.code == 2 and done.json["error"] == "daemon_unreachable"
    assert "config.toml" in done.json["detail"], done
    Path(fresh.home, "config.toml").unlink()
    assert fresh("sandbox", "list").code == 0


def test_a_home_that_cannot_be_used_says_so(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    done = cli("sandbox", "list", env={"ATOLL_HOME": str(tmp_path / "file")})
    assert done.code == 2 and done.json["error"] == "daemon_unreachable" and "ATOLL_HOME" in done.json["detail"]


def test_the_daemon_is_not_our_child_and_keeps_nothing_of_ours(fresh: Cli) -> None:
    """No zombie, no inherited descriptor: a pipe we gave the CLI closes when the CLI ends, daemon or not."""
    process = fresh.popen("sandbox", "run", "echo x", stdout=subprocess.PIPE, stdin=subprocess.DEVNULL)
    assert process.stdout is not None
    assert b'"stdout":"x\\n"' in process.stdout.read()  # read() returns only when every holder is gone
    assert process.wait(WAIT) == 0
    pid = fresh.ok("daemon", "status", "--json")["pid"]
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    assert int(fields[3]) == pid  # a session of its own; who its parent is depends on the nearest subreaper
    assert os.readlink(f"/proc/{pid}/cwd") == "/"


def test_serve_is_the_daemon_in_the_foreground(fresh: Cli) -> None:
    process = fresh.popen("serve", "--grpc", "127.0.0.1:0", stderr=subprocess.DEVNULL)
    try:
        until = time.monotonic() + WAIT
        while not fresh.ok("daemon", "status", "--json")["running"]:
            assert time.monotonic() < until and process.poll() is None
            time.sleep(0.1)
        assert fresh.ok("daemon", "status", "--json")["pid"] == process.pid
        process.terminate()
        assert process.wait(WAIT) == 0
    finally:
        if process.poll() is None:
            process.kill()
            process.wait(WAIT)


def test_a_working_directory_full_of_traps_changes_nothing(fresh: Cli, tmp_path: Path) -> None:
    """CTL-12: modules lying where the caller stands are neither imported by the CLI's daemon nor run."""
    for name in ("asyncio", "msgspec", "uvloop", "logging"):
        (tmp_path / f"{name}.py").write_text(f"open('{tmp_path}/trapped', 'w')\n")
    program = "import sys; sys.path[:] = [p for p in sys.path if p]; from atoll.cli import main; sys.exit(main())"
    words = [fresh.command()[0], "-c", program, "sandbox", "list"]
    done = subprocess.run(words, env=fresh.env, cwd=tmp_path, capture_output=True, timeout=WAIT)
    assert done.returncode == 0, done
    assert not (tmp_path / "trapped").exists()


def test_doctor(cli: Cli) -> None:
    done = cli("doctor", "--json")
    answer = done.json
    assert done.code == (0 if answer["ok"] else 1) and answer["problems"] == (0 if answer["ok"] else answer["problems"])
    names = {check["name"]: check for check in answer["checks"]}
    for name in ("kernel", "cgroups", "user namespaces", "container engine", "disk", "daemon", "runtime container"):
        assert name in names and names[name]["detail"]
    assert names["runtime container"]["ok"] is True
    text = cli("doctor")
    assert text.code == done.code and b"runtime container" in text.stdout


@pytest.mark.parametrize("words", [["version"], ["--version"], ["-V"]])
def test_version(cli: Cli, words: list[str]) -> None:
    import atoll

    assert cli(*words).text == f"atoll {atoll.__version__}\n"


def test_version_check_names_every_part(fresh: Cli) -> None:
    """And a store that a newer version has written is refused with words, and left alone."""
    import sqlite3

    import atoll

    done = fresh("version", "--check", "--json")
    rows = {row["name"]: row["detail"] for row in done.json["checks"]}
    assert done.code == 0 and rows["atoll"] == rows["daemon"] == atoll.__version__, done
    assert atoll.__version__ in rows["agent"] and rows["store"].startswith("schema "), rows
    assert fresh("version", "--check").text.startswith(f"atoll    {atoll.__version__}\ndaemon ")
    fresh("daemon", "stop", "--force")
    store = Path(fresh.home, "atoll.db")
    with sqlite3.connect(store) as db:
        db.execute("PRAGMA user_version=999")
    refused = fresh("version", "--check")
    assert refused.code == 1 and b"written by a newer atoll (schema 999" in refused.stdout, refused
    assert b"fix:" in refused.stderr
    store.unlink()


def test_everyday_7_serve_takes_over_from_an_idle_daemon_started_on_demand(fresh: Cli) -> None:
    session = fresh.ok("sandbox", "create")["session_id"]
    fresh.ok("sandbox", "destroy", session)
    first = fresh.ok("daemon", "status", "--json")["pid"]
    serving = fresh.popen("serve", "--grpc", "127.0.0.1:0", stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    until = time.monotonic() + WAIT
    while (
        not (Path(fresh.home) / "grpc.endpoint").exists()
        or fresh.ok("daemon", "status", "--json")["pid"] != serving.pid
    ):
        assert time.monotonic() < until and serving.poll() is None
        time.sleep(0.05)
    assert gone(first)
    assert fresh("daemon", "stop").code == 0
    assert b"taking over" in serving.communicate()[1]


def test_everyday_7_serve_beside_a_daemon_in_use_says_what_to_do(fresh: Cli) -> None:
    session = fresh.ok("sandbox", "create")["session_id"]
    refused = fresh("serve", "--grpc", "127.0.0.1:0")
    assert refused.code != 0
    assert b"atoll daemon stop; atoll serve" in refused.stderr
    fresh.ok("sandbox", "destroy", session)
    assert fresh("daemon", "start").code == 0  # pinned: somebody wants exactly this one
    refused = fresh("serve", "--grpc", "127.0.0.1:0")
    assert refused.code != 0 and b"atoll daemon stop; atoll serve" in refused.stderr
