"""Automatic and tenants' sessions: stopped when idle with their files kept, started by the next use, and never lost
without a word."""

import json
import os
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from lab.waiting import until

from .conftest import WAIT, Cli


def at_rest(cli: Cli, session: str) -> None:
    until(lambda: cli.ok("sandbox", "get", session)["phase"] == "Paused", f"{session} never came to rest")


def test_everyday_2_an_idle_session_keeps_its_files_and_starts_again(cli: Cli, tenant: str) -> None:
    flags = ("--tenant", tenant)
    first = cli.ok("sandbox", "run", "echo kept > /workspace/f; pip --version", *flags, "--idle-timeout", "15")
    session = first["session_id"]
    ends = cli.ok("sandbox", "get", session)["expires_at"]
    assert 11 * 3600 < ends - time.time() <= 12 * 3600
    at_rest(cli, session)
    told = cli.ok("sandbox", "get", session)
    assert 6.9 * 86400 < told["expires_at"] - time.time() <= 7 * 86400, "its disk is kept for a week"
    again = cli("sandbox", "run", "cat /workspace/f", *flags)
    assert (again.json["stdout"], again.json["session_id"]) == ("kept\n", session)
    assert "session_replaced" not in again.json and not again.stderr
    left = cli.ok("sandbox", "get", session)["expires_at"] - time.time()
    assert left <= 12 * 3600 and left > 11 * 3600, "its lifetime counts while it runs"


def test_everyday_2_every_use_wakes_it_and_many_at_once_wake_it_once(cli: Cli, tenant: str) -> None:
    flags = ("--tenant", tenant)
    session = cli.ok("sandbox", "run", "echo 1 > f", *flags, "--idle-timeout", "3")["session_id"]
    at_rest(cli, session)
    with ThreadPoolExecutor(4) as pool:
        done = list(pool.map(lambda n: cli("sandbox", "run", f"cat f; echo {n} > g{n}", *flags), range(4)))
    assert [one.json["stdout"] for one in done] == ["1\n"] * 4 and {d.json["session_id"] for d in done} == {session}
    at_rest(cli, session)
    assert cli.ok("sandbox", "read", session, "/workspace/g3")["content"] == "3\n"
    at_rest(cli, session)
    assert cli("exec", session, "cat", "f").stdout == b"1\n"


def test_everyday_2_what_a_person_stopped_stays_stopped(cli: Cli) -> None:
    session = cli.ok("sandbox", "create", "--persistent")["session_id"]
    try:
        cli.ok("sandbox", "stop", session)
        refused = cli("exec", session, "true")
        assert refused.code == 125 and b"stopped" in refused.stderr and b"start" in refused.stderr
    finally:
        cli.ok("sandbox", "destroy", session)


def test_everyday_2_a_loss_is_told(cli: Cli, tenant: str) -> None:
    flags = ("--tenant", tenant)
    state = Path(cli.home) / "sandbox" / tenant / "state.json"
    first = cli.ok("sandbox", "run", "echo 1 > f", *flags)["session_id"]
    entry = state.read_text()
    cli.ok("sandbox", "destroy", first)
    state.write_text(entry)  # as if it had ended behind our back
    again = cli("sandbox", "run", "ls", *flags)
    assert again.code == 0 and again.json["session_id"] != first and again.json["stdout"] == ""
    assert again.json["session_replaced"] == {"session_id": first, "reason": "destroyed", "lost": "the files"}
    assert first.encode() in again.stderr and b"lost" in again.stderr
    assert "session_replaced" not in cli.ok("sandbox", "run", "true", *flags), "it is told once"


def test_everyday_2_kept_disks_stay_within_the_owners_budget(fresh: Cli) -> None:
    Path(fresh.home, "config.toml").write_text("[sandboxes]\nkeep_disk_mb = 16\n")
    sessions = []
    for name in ("old", "new"):
        code = "dd if=/dev/urandom of=/workspace/f bs=1M count=12 status=none; sync"
        sessions.append(fresh.ok("sandbox", "run", code, "--tenant", name, "--idle-timeout", "2")["session_id"])
        until(lambda: fresh.ok("sandbox", "get", sessions[-1])["phase"] != "Active", "never came to rest")
    until(lambda: fresh.ok("sandbox", "get", sessions[0])["phase"] == "Terminating", "the older one was kept")
    assert fresh.ok("sandbox", "get", sessions[0])["end"]["kind"] == "evicted"
    assert fresh.ok("sandbox", "run", "wc -c < f", "--tenant", "new")["stdout"].strip() == str(12 << 20)
    lost = fresh("sandbox", "run", "ls", "--tenant", "old")
    assert lost.json["session_replaced"]["reason"] == "evicted" and b"make room" in lost.stderr


def test_everyday_5_a_binary_file_is_marked_as_such(cli: Cli, box: str) -> None:
    data = b"\x89PNG\r\n\x1a\n\x00\xff"
    cli.ok("sandbox", "write", box, "/workspace/p.png", stdin=data)
    found = cli.ok("sandbox", "read", box, "/workspace/p.png")
    assert found == {"path": "/workspace/p.png", "encoding": "base64", "content_b64": "iVBORw0KGgoA/w=="}
    cli.ok("sandbox", "write", box, "/workspace/t", stdin="é\n".encode())
    assert cli.ok("sandbox", "read", box, "/workspace/t")["content"] == "é\n"


def test_everyday_5_raw_output_has_no_error_in_it(cli: Cli, box: str) -> None:
    for words in (("read", box, "/no/such", "--raw"), ("read", "nobody", "/f", "--raw"), ("read", "--raw")):
        done = cli("sandbox", *words)
        assert done.code == 1 and done.stdout == b"", done
        assert json.loads(done.stderr)["ok"] is False
    done = cli("sandbox", "run", "echo 1", "--session-id", "nobody", "--raw")
    assert done.code == 1 and done.stdout == b"" and json.loads(done.stderr)["error"] == "not_found"


def test_everyday_6_a_run_elsewhere_leaves_the_local_session_alone(cli: Cli, fresh: Cli) -> None:
    here = cli.ok("sandbox", "run", "echo 1")["session_id"]
    fresh.ok("sandbox", "run", "true")
    other = {"ATOLL_ENDPOINT": f"unix:{fresh.home}/daemon.sock"}
    there = cli.ok("sandbox", "run", "echo 2 > f", env=other)["session_id"]
    assert there != here
    assert cli.ok("sandbox", "run", "echo 3")["session_id"] == here
    assert cli.ok("sandbox", "run", "cat f", env=other)["session_id"] == there
    assert cli.ok("sandbox", "destroy", there, env=other) == {"ok": True}
    assert cli.ok("sandbox", "run", "true")["session_id"] == here
    assert cli.ok("sandbox", "run", "true", env=other)["session_id"] != there


def hosts(cli: Cli, session: str) -> list[str]:
    return list(cli.ok("sandbox", "get", session)["allowed_hosts"])


def test_everyday_12_allow_host_adds_to_the_list(cli: Cli, tenant: str) -> None:
    default = hosts(cli, cli.ok("sandbox", "run", "true", "--tenant", tenant)["session_id"])
    made = cli.ok("sandbox", "create", "--allow-host", "a.example", "--allow-host", "b.example,c.example")
    try:
        assert hosts(cli, made["session_id"]) == [*default, "a.example", "b.example", "c.example"]
        assert cli("exec", "--allow-host", "d.example", made["session_id"], "true").code == 0
        cli.ok("sandbox", "run", "true", "--allow-host", "e.example", "--session-id", made["session_id"])
        assert hosts(cli, made["session_id"])[-2:] == ["d.example", "e.example"]
    finally:
        cli.ok("sandbox", "destroy", made["session_id"])
    only = cli.ok("sandbox", "create", "--allowed-hosts", "x.example", "--allow-host", "y.example")["session_id"]
    assert hosts(cli, only) == ["x.example", "y.example"]
    cli.ok("sandbox", "destroy", only)


def test_everyday_12_the_hint_for_a_refused_host_adds_it(cli: Cli) -> None:
    code = "import socket, sys\ntry: socket.getaddrinfo('refused.example', 80)\nexcept OSError: sys.exit(3)"
    done = cli("run", "python3", "-c", code)
    assert done.code == 3 and b"atoll run --allow-host refused.example" in done.stderr, done
    shown = cli("run", "--keep", "--allow-host", "z.example", "true")
    name = next(word for word in shown.stderr.decode().split() if word.startswith("run-"))
    found = cli.ok("sandbox", "info", name)["hosts"]
    assert "z.example" in found and "pypi.org" in found
    cli("remove", name)


def test_everyday_16_help_and_hints_use_the_name_it_was_called_by(cli: Cli) -> None:
    for name in ("k8e", "agentkernel"):
        main = f"import sys; sys.argv[0] = '/usr/bin/{name}'; from atoll.cli import main; sys.exit(main())"

        def call(*words: str, main: str = main) -> "subprocess.CompletedProcess[bytes]":
            import sys

            env = {**cli.env, "HOME": cli.home}
            return subprocess.run([sys.executable, "-c", main, *words], capture_output=True, env=env, timeout=WAIT)

        for words in (("help",), ("help", "exec"), ("help", "sandbox", "run"), ("--help",)):
            text = call(*words).stdout.decode()
            assert f"{name} " in text and "atoll exec" not in text and "atoll sandbox" not in text, text
            assert "Usage: atoll" not in text and "`atoll help" not in text
        wrong = call("exce").stderr.decode()
        assert "atoll" not in wrong and wrong.startswith(name), wrong
        missing = call("exec", f"nobody-{os.getpid()}", "true").stderr.decode()
        assert f"`{name} list`" in missing, missing
