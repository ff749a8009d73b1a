"""Automatic, tenant and manual sessions (P09 to P13, D28), and what `get`, `list` and `status` say of them."""

import json
import os
import subprocess
from pathlib import Path

from .conftest import WAIT, Cli


def state_of(cli: Cli, tenant: str) -> dict[str, object]:
    return dict(json.loads((Path(cli.home) / "sandbox" / tenant / "state.json").read_text()))


def test_k8e_P09_P08_two_runs_share_the_default_session(fresh: Cli) -> None:
    first = fresh.ok("sandbox", "run", "echo kept > f; echo $$")
    second = fresh.ok("sandbox", "run", "cat f")
    assert second["stdout"] == "kept\n" and first["session_id"] == second["session_id"]
    entry = state_of(fresh, "default")
    assert (entry["session_id"], entry["phase"], entry["tenant_id"]) == (first["session_id"], "active", "default")


def test_k8e_P10_a_tenants_session_is_found_again(cli: Cli, tenant: str) -> None:
    first = cli.ok("sandbox", "run", "touch mine", "--tenant", tenant)
    assert cli.ok("sandbox", "run", "ls", env={"ATOLL_TENANT": tenant})["stdout"] == "mine\n"
    assert cli.ok("sandbox", "run", "ls", env={"K8E_SANDBOX_TENANT": tenant})["session_id"] == first["session_id"]
    assert state_of(cli, tenant)["session_id"] == first["session_id"]
    assert cli.ok("sandbox", "get", first["session_id"])["tenant_id"] == tenant


def test_k8e_P11_manual_sessions_leave_no_state(fresh: Cli) -> None:
    session = fresh.ok("sandbox", "create")["session_id"]
    assert fresh.ok("sandbox", "run", "echo 1", "--session-id", session)["session_id"] == session
    assert fresh.ok("sandbox", "run", "echo 1", env={"K8E_SANDBOX_SESSION_ID": session})["session_id"] == session
    assert fresh.ok("sandbox", "destroy", session) == {"ok": True}
    assert not list(Path(fresh.home).glob("sandbox/*/state.json"))
    gone = fresh("sandbox", "run", "echo 1", "--session-id", session)
    assert gone.code == 1 and gone.json["ok"] is False and gone.json["error"] in ("not_found", "sandbox_gone")
    assert gone.json["detail"]


def test_k8e_P12_a_lost_session_is_replaced(cli: Cli, tenant: str) -> None:
    first = cli.ok("sandbox", "run", "echo 1", "--tenant", tenant)["session_id"]
    status = cli.ok("sandbox", "status", "--tenant", tenant)
    assert (status["available"], status["session_id"], status["tenant_id"]) == (True, first, tenant)
    assert cli.ok("sandbox", "destroy", first) == {"ok": True}
    assert not (Path(cli.home) / "sandbox" / tenant / "state.json").exists()
    second = cli.ok("sandbox", "run", "echo 2", "--tenant", tenant)["session_id"]
    assert second != first
    path = Path(cli.home) / "sandbox" / tenant / "state.json"
    path.write_text(json.dumps({**state_of(cli, tenant), "session_id": first}))  # as if it had ended behind our back
    for flags in ([], ["--raw"], ["--background"]):
        path.write_text(json.dumps({**state_of(cli, tenant), "session_id": first}))
        done = cli("sandbox", "run", "echo 3", "--tenant", tenant, *flags)
        assert done.code == 0, done
        assert state_of(cli, tenant)["session_id"] not in (first, "")
    cli("sandbox", "destroy", second)
    for item in cli.ok("sandbox", "list")["sandboxes"]:
        if item["tenant_id"] == tenant and item["session_id"] != state_of(cli, tenant)["session_id"]:
            cli("sandbox", "destroy", item["session_id"])


def test_k8e_P13_limits_hold_and_the_workspace_goes_with_the_session(cli: Cli) -> None:
    flags = ["--memory", "128", "--cpus", "0.5", "--pids", "64", "--files", "256", "--disk", "64", "--lifetime", "3600"]
    session = cli.ok("sandbox", "create", *flags)["session_id"]
    found = cli.ok("sandbox", "get", session)
    limits = {name: limit["value"] for name, limit in found["limits"].items()}
    assert limits == {"cpus": 0.5, "memory_mb": 128, "pids": 64, "files": 256, "disk_mb": 64, "shm_mb": 64}
    assert found["phase"] == "Active" and found["expires_at"] > 0
    if found["limits"]["memory_mb"]["enforced"]:
        hog = cli("sandbox", "run", "x = bytearray(400_000_000)", "--lang", "python", "--session-id", session)
        assert hog.code != 0 and hog.json["exit_code"] == 137, hog
    assert cli.ok("sandbox", "run", "ulimit -n", "--session-id", session)["stdout"] == "256\n"
    cli.ok("sandbox", "destroy", session)
    assert cli("sandbox", "read", session, "/workspace/x").json["error"] in ("not_found", "sandbox_gone")


def test_twenty_runs_at_once_on_nothing_get_one_daemon_and_one_session(fresh: Cli) -> None:
    runs = [
        fresh.popen("sandbox", "run", f"echo {n}; exit {n}", stdin=subprocess.DEVNULL, stdout=subprocess.PIPE)
        for n in range(20)
    ]
    answers = []
    for number, run in enumerate(runs):
        out, _ = run.communicate(timeout=WAIT)
        assert run.returncode == number, out
        answers.append(json.loads(out))
    assert [answer["stdout"] for answer in answers] == [f"{n}\n" for n in range(20)]
    assert len({answer["session_id"] for answer in answers}) == 1
    assert len(fresh.ok("sandbox", "list")["sandboxes"]) == 1
    home = fresh.home.encode()
    daemons = []
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                line = (Path("/proc") / entry / "cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            if b"atoll.server.daemon" in line and home in line:
                daemons.append(entry)
    assert len(daemons) == 1


def test_k8e_P15_twenty_runs_of_a_tenant_meet_what_its_manifest_made_and_all_of_it(fresh: Cli, tmp_path: Path) -> None:
    """The first run fills the session; those that come meanwhile, from here and from elsewhere, wait for the last file."""
    entries = "".join(f'  - file: {{path: "f{number}", content: "{number}"}}\n' for number in range(1000))
    manifest = tmp_path / "workspace.yaml"
    manifest.write_text(f"entries:\n{entries}")
    run = ("sandbox", "run", "cat f999", "--tenant", "team")
    filled = (*run, "--manifest", str(manifest))
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE}
    first = fresh.popen(*filled, stderr=subprocess.PIPE, **pipes)
    assert first.stderr is not None and first.stderr.readline() == b"atoll: entry 1/1000: file f0\n"
    elsewhere = {"ATOLL_CERT_DIR": str(tmp_path / "other"), "ATOLL_ENDPOINT": f"unix:{fresh.home}/daemon.sock"}
    others = [
        fresh.popen(*(filled if n % 2 else run), env=elsewhere if n % 4 > 1 else {}, stderr=subprocess.DEVNULL, **pipes)
        for n in range(19)
    ]
    answers = [json.loads(one.communicate(timeout=WAIT)[0]) for one in (*others, first)]
    assert [answer["stdout"] for answer in answers] == ["999"] * 20, answers
    assert len({answer["session_id"] for answer in answers}) == 1
    assert len(fresh.ok("sandbox", "list")["sandboxes"]) == 1
    again = fresh(*filled)
    assert again.json["session_id"] == answers[0]["session_id"] and b"fill only a new one" in again.stderr


def test_k8e_D28_a_crashed_creator_blocks_nobody(cli: Cli, tenant: str) -> None:
    place = Path(cli.home) / "sandbox" / tenant
    place.mkdir(parents=True)
    gone = subprocess.Popen(["true"])
    gone.wait(WAIT)
    entry = {
        "session_id": "",
        "phase": "creating",
        "tenant_id": tenant,
        "created_at": "2026-01-01T00:00:00Z",
        "pid": gone.pid,
    }
    (place / "state.json").write_text(json.dumps(entry))
    assert cli.ok("sandbox", "run", "echo on", "--tenant", tenant)["stdout"] == "on\n"
    assert state_of(cli, tenant)["phase"] == "active"


def test_an_id_of_ones_own(cli: Cli) -> None:
    own = f"my-{os.urandom(4).hex()}"
    assert cli.ok("sandbox", "create", "--session-id", own)["session_id"] == own
    assert cli.ok("sandbox", "run", "echo x", "--session-id", own)["session_id"] == own
    assert cli.ok("sandbox", "destroy", own) == {"ok": True}


def test_lists(cli: Cli) -> None:
    name = f"n-{os.urandom(4).hex()}"
    session = cli.ok("sandbox", "create", "--name", name, "--env", "A=1", "--label", "team=x")["session_id"]
    listed = {item["session_id"]: item for item in cli.ok("sandbox", "list")["sandboxes"]}
    assert listed[session]["name"] == name and listed[session]["env_keys"] == ["A"]
    assert session in [item["session_id"] for item in cli.ok("sandbox", "sessions")["sessions"]]
    assert cli("sandbox", "create", "--name", name).json["error"] == "already_exists"
    assert cli.ok("sandbox", "run", "echo $A", "--session-id", name)["stdout"] == "1\n"
    cli.ok("sandbox", "destroy", name)
    assert session not in [item["session_id"] for item in cli.ok("sandbox", "sessions")["sessions"]]
    ended = {item["session_id"]: item for item in cli.ok("sandbox", "sessions", "--phase", "all")["sessions"]}
    assert ended[session]["phase"] == "Terminating" and ended[session]["end"]["kind"] == "destroyed"


def test_called_as_k8e_the_state_is_where_k8e_keeps_it(cli: Cli, tmp_path: Path) -> None:
    """P09 to the letter: under the name k8e the file is ~/.k8e/sandbox/default/state.json."""
    cli.ok("sandbox", "list")  # an endpoint names a daemon that runs: nobody starts one for it
    program = "import sys; sys.argv[0] = '/usr/bin/k8e'; from atoll.cli import main; sys.exit(main())"
    words = [cli.command()[0], "-c", program, "sandbox", "run", "echo k8e"]
    env = {**cli.env, "HOME": str(tmp_path), "ATOLL_ENDPOINT": f"unix:{cli.home}/daemon.sock"}
    moved = subprocess.run(words, env=env, capture_output=True, timeout=WAIT)
    assert moved.returncode == 0 and not (tmp_path / ".k8e").exists(), "ATOLL_HOME moves all state"
    cli("sandbox", "destroy", json.loads(moved.stdout)["session_id"])
    del env["ATOLL_HOME"]
    done = subprocess.run(words, env=env, capture_output=True, timeout=WAIT)
    assert done.returncode == 0, done
    session = json.loads(done.stdout)["session_id"]
    (state,) = (tmp_path / ".k8e/sandbox/default").rglob("state.json")
    assert json.loads(state.read_text())["session_id"] == session
    cli("sandbox", "destroy", session)


def test_code_whose_sandbox_ends_under_it_is_not_run_again(cli: Cli, tenant: str) -> None:
    """A sandbox that was gone before is replaced; one that goes with the code in it is told, with what became of the files."""
    process = cli.popen(
        "sandbox", "run", "echo up; sleep 600", "--timeout", "700", "--raw", "--tenant", tenant, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )  # fmt: skip
    assert process.stdout is not None and process.stderr is not None and process.stdout.readline() == b"up\n"
    session = cli.ok("sandbox", "status", "--tenant", tenant)["session_id"]
    cli.ok("sandbox", "destroy", session)
    assert process.stdout.read() == b"" and process.wait(WAIT) == 1
    answer = json.loads(process.stderr.read())
    assert answer["error"] == "sandbox_gone" and "files in it are lost" in answer["detail"]
    again = cli.ok("sandbox", "run", "echo new", "--tenant", tenant)
    assert again["stdout"] == "new\n" and again["session_id"] != session
    cli.ok("sandbox", "destroy", again["session_id"])  # by its id from elsewhere, between two runs
    assert cli.ok("sandbox", "run", "echo third", "--tenant", tenant)["stdout"] == "third\n"
