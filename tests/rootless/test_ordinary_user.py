"""Without root: sandboxes work, what cannot be held is said, and nothing is left."""

import json
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from lab.rootless import User, delegated, until

RUNTIMES = ["container", pytest.param("gvisor", marks=pytest.mark.skipif(not shutil.which("runsc"), reason="no runsc"))]
PLANT = "for place in /workspace /usr/bin /tmp; do cp /usr/bin/id $place/planted; chmod 4755 $place/planted; done"


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_a_command_runs_and_says_how_it_ended(user: User, runtime: str) -> None:
    """Output apart, exit code, root inside, and on the host nobody but the user."""
    made = user.json("sandbox", "create", "--runtime", runtime)
    try:
        session = made["session_id"]
        script = "id -u; echo no >&2; touch /usr/bin/mine /etc/mine /workspace/mine && exit 3"
        done = user.atoll("sandbox", "run", script, "--lang", "bash", "--session-id", session)
        result = json.loads(done.stdout)
        assert (result["stdout"], result["stderr"], result["exit_code"]) == ("0\n", "no\n", 3), result
        assert user.processes() and not Path("/usr/bin/mine").exists()
    finally:
        user.json("sandbox", "destroy", session)


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_what_cannot_be_held_is_said(user: User, runtime: str) -> None:
    """A default limit that nobody holds is shown so; one that was asked for is held or refused."""
    made = user.json("sandbox", "create", "--runtime", runtime)
    limits = user.json("sandbox", "get", made["session_id"])["limits"]
    user.json("sandbox", "destroy", made["session_id"])
    assert not limits["disk_mb"]["enforced"] and not limits["memory_mb"]["enforced"]
    made = user.json("sandbox", "create", "--runtime", runtime, "--disk", "32")
    session = made["session_id"]
    try:
        limits = user.json("sandbox", "get", session)["limits"]
        held = {name: limit["enforced"] for name, limit in limits.items()}
        assert held["disk_mb"] and held["files"]
        assert not held["memory_mb"] and not held["cpus"] and held["pids"] == (runtime == "gvisor")
        fill = "dd if=/dev/zero of=/workspace/x bs=1M count=64"
        result = user.atoll("sandbox", "run", fill, "--lang", "bash", "--session-id", session)
        assert "No space" in json.loads(result.stdout)["stderr"]
    finally:
        user.json("sandbox", "destroy", session)
    refused = user.atoll("sandbox", "create", "--runtime", runtime, "--memory", "64")
    assert refused.returncode != 0 and "memory" in refused.stdout + refused.stderr
    assert user.json("sandbox", "list")["sandboxes"] == []


def test_default_limits_nobody_holds_are_said_once(user: User) -> None:
    """On stderr, by the first command that makes a sandbox; the command's own output stays its own."""
    (user.home / "a" / "unheld-limits").unlink(missing_ok=True)
    for said in (True, False):
        done = user.atoll("run", "--image", "host", "echo", "fine")
        assert (done.returncode, done.stdout) == (0, "fine\n"), done
        assert ("does not hold the default limits for CPU, memory" in done.stderr) is said, done.stderr
    (user.home / "a" / "unheld-limits").unlink()
    made = user.atoll("sandbox", "create", "--runtime", "container")
    assert "does not hold the default limits for CPU, memory" in made.stderr
    user.json("sandbox", "destroy", json.loads(made.stdout)["session_id"])


def test_a_killed_daemon_leaves_its_sandboxes_to_the_next(user: User) -> None:
    """The next daemon of the user enters the same namespace and finds them running."""
    made = user.json("sandbox", "create", "--runtime", "container")
    session = made["session_id"]
    try:
        user.json("sandbox", "run", "echo kept > /workspace/file", "--lang", "bash", "--session-id", session)
        os.kill(int((user.home / "a" / "daemon.lock").read_text()), signal.SIGKILL)
        read = user.json("sandbox", "run", "cat /workspace/file", "--lang", "bash", "--session-id", session)
        assert read["stdout"] == "kept\n"
    finally:
        user.json("sandbox", "destroy", session)


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_a_stopped_sandbox_comes_back_with_its_files(user: User, runtime: str) -> None:
    """Also those of other ids inside, and what was changed in /usr."""
    made = user.json("sandbox", "create", "--runtime", runtime)
    session = made["session_id"]
    try:
        change = "echo kept > /workspace/file; rm /usr/bin/env; touch /etc/mine; chown 5:5 /etc/mine 2>/dev/null; true"
        user.json("sandbox", "run", change, "--lang", "bash", "--session-id", session)
        assert user.atoll("sandbox", "stop", session).returncode == 0
        assert user.atoll("sandbox", "start", session).returncode == 0
        look = "cat /workspace/file; ls /etc/mine; ls /usr/bin/env 2>/dev/null; true"
        assert user.json("sandbox", "run", look, "--lang", "bash", "--session-id", session)["stdout"] == (
            "kept\n/etc/mine\n"
        )
    finally:
        user.json("sandbox", "destroy", session)


def test_a_sub_agent_shares_the_workspace(user: User) -> None:
    """The directory of the parent's; a disk in memory, which was asked for, cannot be shared, and that is said."""
    parent = user.json("sandbox", "create", "--runtime", "container")["session_id"]
    limited = user.json("sandbox", "create", "--runtime", "container", "--disk", "32")["session_id"]
    try:
        user.json("sandbox", "run", "echo theirs > /workspace/file", "--lang", "bash", "--session-id", parent)
        child = user.json("sandbox", "subagent", parent)["session_id"]
        look = "cat /workspace/file && echo back > /workspace/answer"
        assert user.json("sandbox", "run", look, "--lang", "bash", "--session-id", child)["stdout"] == "theirs\n"
        answer = user.json("sandbox", "run", "cat /workspace/answer", "--lang", "bash", "--session-id", parent)
        assert answer["stdout"] == "back\n"
        refused = user.atoll("sandbox", "subagent", limited)
        assert refused.returncode != 0 and "in memory" in refused.stdout + refused.stderr
    finally:
        for session in (parent, limited):
            user.json("sandbox", "destroy", session)


def test_the_users_own_files_stay_out_of_reach(user: User) -> None:
    """Root inside is the user outside, and still sees nothing of the user's home."""
    secret = user.home / "secret"
    secret.write_text("hidden")
    secret.chmod(0o644)
    command = f"cat {secret} /proc/1/root{secret}; ls -A {user.home.parent}; grep -r hidden /home /root /tmp /mnt; true"
    result = json.loads(user.atoll("sandbox", "run", command, "--lang", "bash").stdout)
    assert "hidden" not in result["stdout"], result


def test_another_user_sees_nothing(user: User) -> None:
    """Neither the socket nor a file of the state directory is for somebody else."""
    made = user.json("sandbox", "create", "--runtime", "container")
    home, session = user.home / "a", made["session_id"]
    try:
        user.home.chmod(0o755)  # only atoll's own walls are left
        places = [
            home,
            home / "boxes",
            home / "atoll.db",
            home / "daemon.sock",
            home / "transcripts",
            home / "daemon.log",
        ]
        places += [p for top in ("run", "boxes") for p in (home / top).iterdir()]
        assert len(places) >= 8 and all(place.exists() for place in places)
        for place in places:
            look = ["ls"] if place.is_dir() else ["test", "-w" if place.is_socket() else "-r"]
            done = subprocess.run(
                ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", *look, str(place)], capture_output=True
            )
            assert done.returncode != 0, place
        # Root inside is the user outside: a set-uid program made there would be the user's, for whoever can start it.
        user.json("sandbox", "run", PLANT, "--lang", "bash", "--session-id", session)
        planted = [path for path in home.glob(f"boxes/{session.removeprefix('sess-')}/**/planted")]
        assert planted and all(path.stat().st_mode & 0o4000 and path.stat().st_uid == user.uid for path in planted)
        for path in planted:
            start = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", "sh", "-c", '"$0" -u', str(path)]
            assert subprocess.run(start, capture_output=True).stdout == b"", path
    finally:
        user.home.chmod(0o700)
        user.json("sandbox", "destroy", session)


def test_nothing_is_left_after_the_daemon(user: User) -> None:
    """A forced stop ends every process of the user, and nothing of a sandbox stays in the home."""
    user.json("sandbox", "create", "--runtime", "container")
    assert user.atoll("daemon", "stop", "--force").returncode == 0
    until(lambda: not user.processes(), "nothing of the user runs")
    home = user.home / "a"
    assert not any((home / "run").iterdir()) and not any((home / "boxes").iterdir())


@pytest.fixture
def group(user: User) -> Iterator[str]:
    with delegated(user) as name:
        yield name


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_limits_are_held_where_they_were_delegated(user: User, group: str, runtime: str) -> None:
    """With groups of the user's own a limit can be asked for, and a hog dies of it."""
    user.atoll("daemon", "stop", "--force")
    until(lambda: not user.processes(), "the daemon without groups is gone")
    made = user.json(
        *("sandbox", "create", "--runtime", runtime, "--memory", "128", "--pids", "64", "--cpus", "1"), group=group
    )
    session = made["session_id"]
    limits = user.json("sandbox", "get", session)["limits"]
    held = {name for name, limit in limits.items() if limit["enforced"]}
    assert held >= {"memory_mb", "pids", "cpus", "files"}, limits
    code = "import os; print(open('/proc/meminfo').read().split()[1], os.cpu_count(), len(os.sched_getaffinity(0)))"
    done = user.atoll("sandbox", "run", code, "--lang", "python", "--raw", "--session-id", session)
    assert done.stdout.split() == [str(128 << 10), "1", "1"], done
    done = user.atoll("sandbox", "run", "x = bytearray(1 << 30)", "--lang", "python", "--session-id", session)
    assert done.returncode != 0
    assert user.atoll("daemon", "stop", "--force").returncode == 0


def held(user: User, session: str) -> set[str]:
    limits = user.json("sandbox", "get", session)["limits"]
    return {name for name, limit in limits.items() if limit["enforced"]}


def test_distro_4_a_daemon_with_limits_is_not_replaced_by_one_without(user: User, group: str) -> None:
    """After it dies, a command from a session without groups is refused with what to do; one from the groups goes on."""
    user.atoll("daemon", "stop", "--force")
    until(lambda: not user.processes(), "the daemon without groups is gone")
    session = user.json("sandbox", "create", "--runtime", "container", "--memory", "128", group=group)["session_id"]
    os.kill(int((user.home / "a" / "daemon.lock").read_text()), signal.SIGKILL)
    refused = user.atoll("sandbox", "run", "true", "--session-id", session)
    said = refused.stdout + refused.stderr
    assert refused.returncode == 2 and "held limits for cpu, memory, pids" in said and "Delegate=yes" in said, said
    user.json("sandbox", "run", "true", "--session-id", session, group=group)
    assert held(user, session) >= {"memory_mb", "pids", "cpus"}
    assert user.atoll("daemon", "stop", "--force").returncode == 0
    plain = user.json("sandbox", "create", "--runtime", "container")["session_id"]  # it was stopped on purpose
    assert "memory_mb" not in held(user, plain)


# What the user's service manager does for `systemd-run --scope`: the caller's own process is moved into a group of the user's.
SYSTEMD_RUN = """#!/bin/sh
for place in /sys/fs/cgroup/*/{group}; do echo $$ > "$place/cgroup.procs"; done 2> /dev/null
while [ "$1" != -- ]; do shift; done
shift
exec "$@"
"""


def test_distro_4_the_daemon_starts_in_a_scope_by_itself(user: User, group: str) -> None:
    """From a session without groups, where the service manager answers; then doctor has nothing to say against it."""
    user.atoll("daemon", "stop", "--force")
    until(lambda: not user.processes(), "the daemon without groups is gone")
    programs, answers = user.home / "bin", user.home / "run" / "systemd"
    for directory in (programs, answers):
        directory.mkdir(parents=True, exist_ok=True)
    (answers / "private").touch()
    (programs / "systemd-run").write_text(SYSTEMD_RUN.format(group=group))
    (programs / "systemd-run").chmod(0o755)
    before = dict(user.env)
    user.env |= {"PATH": f"{programs}:{before['PATH']}", "XDG_RUNTIME_DIR": str(user.home / "run")}
    try:
        session = user.json("sandbox", "create", "--runtime", "container", "--memory", "128")["session_id"]
        assert held(user, session) >= {"memory_mb", "pids", "cpus"}
        checks = json.loads(user.atoll("doctor", "--json").stdout)["checks"]
        assert [check["ok"] for check in checks if check["name"] == "delegation"] == [True]
        assert user.atoll("daemon", "stop", "--force").returncode == 0
    finally:
        user.env.clear()
        user.env.update(before)
