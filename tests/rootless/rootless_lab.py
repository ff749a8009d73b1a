"""What the rootless tests share: an ordinary user who runs `atoll`."""

import json
import os
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import atoll

PATIENCE = float(os.environ.get("ATOLL_TEST_PATIENCE", "120"))
SOURCE = Path(atoll.__file__).resolve().parents[1]


class User:
    """Runs `atoll` as an ordinary user with a home of its own."""

    def __init__(self, name: str, uid: int, home: Path, python: str, path: str) -> None:
        self.name, self.uid, self.home, self.python = name, uid, home, python
        self.env = {
            "HOME": str(home),
            "PATH": "/usr/local/bin:/usr/bin:/bin",
            "PYTHONPATH": path,
            "ATOLL_HOME": str(home / "a"),
        }

    def command(self, *words: str) -> list[str]:
        return ["setpriv", f"--reuid={self.uid}", f"--regid={self.uid}", "--clear-groups", *words]

    def atoll(self, *words: str, group: str | None = None) -> "subprocess.CompletedProcess[str]":
        """`group`: name of the control groups to start it in, in every hierarchy that has them."""
        done = subprocess.run(
            self.command(self.python, "-m", "atoll", *words), env=self.env, cwd=self.home, stdin=subprocess.DEVNULL,
            capture_output=True, text=True, timeout=PATIENCE * 2, preexec_fn=(lambda: _enter(group)) if group else None,
        )  # fmt: skip
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


def _enter(group: str) -> None:
    for file in Path("/sys/fs/cgroup").glob(f"*/{group}/cgroup.procs"):
        file.write_text(str(os.getpid()))


def until(condition: Callable[[], Any], what: str) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, f"never came true: {what}"
        time.sleep(0.05)


def manage(*words: str) -> None:
    """useradd and userdel lock the files they change: another test may hold them."""
    deadline = time.monotonic() + PATIENCE
    while True:
        done = subprocess.run(words, capture_output=True, text=True)
        if done.returncode == 0:
            return
        assert time.monotonic() < deadline and "lock" in done.stderr, done.stderr
        time.sleep(0.2)
