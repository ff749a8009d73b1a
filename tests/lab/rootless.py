"""What the rootless tests share: an ordinary user, made for a test and removed after it, who runs `atoll` or pytest."""

import json
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import atoll
from lab.waiting import PATIENCE, until

SOURCE = Path(atoll.__file__).resolve().parents[1]
CONTROLLERS = ("memory", "pids", "cpu", "cpuacct")


class User:
    """Runs things as an ordinary user with a home of its own."""

    def __init__(self, name: str, uid: int, home: Path, python: str, path: str) -> None:
        self.name, self.uid, self.home, self.python = name, uid, home, python
        self.env = {
            "HOME": str(home),
            "PATH": "/usr/local/bin:/usr/bin:/bin",
            "PYTHONPATH": path,
            "ATOLL_HOME": str(home / "a"),
        }

    def run(
        self, *words: str, env: dict[str, str] | None = None, cwd: Path | None = None, group: str | None = None,
        timeout: float = PATIENCE * 2,
    ) -> "subprocess.CompletedProcess[str]":  # fmt: skip
        """`group`: name of the control groups to start it in, in every hierarchy that has them."""
        argv = ["setpriv", f"--reuid={self.uid}", f"--regid={self.uid}", "--clear-groups", *words]
        return subprocess.run(
            argv, env={**self.env, **(env or {})}, cwd=cwd or self.home, stdin=subprocess.DEVNULL, capture_output=True,
            text=True, timeout=timeout, preexec_fn=(lambda: _enter(group)) if group else None,
        )  # fmt: skip

    def atoll(self, *words: str, group: str | None = None) -> "subprocess.CompletedProcess[str]":
        done = self.run(self.python, "-m", "atoll", *words, group=group)
        assert "Traceback" not in done.stderr, done.stderr
        return done

    def json(self, *words: str, group: str | None = None) -> Any:
        done = self.atoll(*words, group=group)
        assert done.returncode == 0, (words, done.stdout, done.stderr, self.log())
        return json.loads(done.stdout)

    def log(self) -> str:
        try:
            return (self.home / "a" / "daemon.log").read_text()[-3000:]
        except OSError:
            return ""

    def processes(self) -> list[str]:
        """What runs with an id of this user's, its subordinate ones included."""
        ranges = [(self.uid, 1)]
        for line in Path("/etc/subuid").read_text().splitlines():
            name, start, count = line.split(":")
            if name == self.name:
                ranges.append((int(start), int(count)))
        found = []
        for entry in Path("/proc").iterdir():
            try:
                uid = entry.stat().st_uid if entry.name.isdigit() else -1
                if any(start <= uid < start + count for start, count in ranges):
                    found.append(f"{entry.name} {(entry / 'cmdline').read_text()[:80]}")
            except OSError:
                continue
        return found


@contextmanager
def ordinary_user(code: tuple[str, str], *, many_ids: bool) -> Iterator[User]:
    """With subordinate ids, as useradd gives them, or without."""
    if os.geteuid() != 0 or not all(shutil.which(name, path="/usr/sbin:/usr/bin") for name in ("useradd", "newuidmap")):
        pytest.skip("needs root to make a user, and newuidmap")
    with tempfile.TemporaryDirectory(prefix="atr-", dir="/tmp") as directory:
        os.chmod(directory, 0o755)
        name = f"atl{os.urandom(4).hex()}"
        manage("/usr/sbin/useradd", "--home-dir", f"{directory}/h", "--create-home", "--shell", "/bin/sh", name)
        home = Path(directory) / "h"
        made = User(name, home.stat().st_uid, home, *code)
        try:
            if not many_ids:
                manage("/usr/sbin/usermod", "--del-subuids", "1-4294967294", "--del-subgids", "1-4294967294", name)
            yield made
            made.atoll("daemon", "stop", "--force")
            until(lambda: not made.processes(), "nothing of the user runs")
        finally:
            for process in made.processes():
                subprocess.run(["kill", "-9", process.split()[0]], capture_output=True)
            manage("/usr/sbin/userdel", name)


@contextmanager
def delegated(user: User) -> Iterator[str]:
    """Control groups of the user's own, as a login manager would give them; their name. In v2, where a group that has
    controllers to give may have no processes, those are in a session below."""
    name, made = f"atoll-test-{user.name}", []
    for mount in sorted(Path("/sys/fs/cgroup").iterdir()):
        if mount.name in CONTROLLERS and (mount / "tasks").exists():
            made.append(mount / name)
        elif mount.name == "unified":
            made += [mount / name, mount / name / "session"]
    if not made:
        pytest.skip("only where v1 control groups are, alone or beside v2")
    try:
        for directory in made:
            directory.mkdir()
            for path in [directory, *directory.iterdir()]:
                os.chown(path, user.uid, user.uid)
        yield name
    finally:
        user.atoll("daemon", "stop", "--force")
        until(lambda: not user.processes(), "nothing of the user runs")
        for directory in reversed(made):
            for root, _, _ in os.walk(directory, topdown=False):
                until(lambda root=root: _removed(root), f"{root} is gone")


def _removed(directory: str) -> bool:
    try:
        os.rmdir(directory)
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True


def _enter(group: str) -> None:
    for mount in Path("/sys/fs/cgroup").iterdir():
        for place in (mount / group / "session", mount / group):
            if place.is_dir():
                (place / "cgroup.procs").write_text(str(os.getpid()))
                break


def manage(*words: str) -> None:
    """useradd and userdel lock the files they change: another test may hold them."""
    deadline = time.monotonic() + PATIENCE
    while True:
        done = subprocess.run(words, capture_output=True, text=True)
        if done.returncode == 0:
            return
        assert time.monotonic() < deadline and "lock" in done.stderr, done.stderr
        time.sleep(0.2)
