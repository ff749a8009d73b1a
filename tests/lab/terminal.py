"""The CLI as a process, also on a terminal of another login session than the test's own."""

import json
import os
import pty
import re
import select
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from lab.sandboxes import SOURCE
from lab.waiting import PATIENCE


class Atoll:
    def __init__(self, home: Path) -> None:
        self.home = home
        self.env = {k: v for k, v in os.environ.items() if not k.startswith(("ATOLL_", "K8E_"))}
        self.env.update(ATOLL_HOME=str(home), PYTHONPATH=SOURCE)
        if "ATOLL_RUNTIME" in os.environ:
            self.env["ATOLL_RUNTIME"] = os.environ["ATOLL_RUNTIME"]

    def argv(self, *words: str) -> list[str]:
        return [sys.executable, "-m", "atoll", *words]

    def __call__(self, *words: str, stdin: bytes = b"") -> "subprocess.CompletedProcess[bytes]":
        return subprocess.run(self.argv(*words), input=stdin, capture_output=True, timeout=PATIENCE, env=self.env)

    def ok(self, *words: str, stdin: bytes = b"") -> Any:
        done = self(*words, stdin=stdin)
        assert done.returncode == 0, (done.stdout, done.stderr)
        return json.loads(done.stdout)

    def fails(self, *words: str, stdin: bytes = b"") -> Any:
        done = self(*words, stdin=stdin)
        assert done.returncode != 0, (done.stdout, done.stderr)
        return json.loads(done.stdout)

    def start(self, *words: str) -> "subprocess.Popen[bytes]":
        """In a session of its own, as an agent's tool calls are."""
        return subprocess.Popen(
            self.argv(*words), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=self.env,
            start_new_session=True,
        )  # fmt: skip


# Its first process ends, so that nobody of ours is among the ancestors; the first terminal opened becomes the controlling one.
ALONE = """
import os, sys
if os.fork():
    os._exit(0)
os.setsid()
os.close(os.open(os.ttyname(0), os.O_RDWR))
os.execve(sys.argv[1], sys.argv[1:], os.environ)
"""


class Terminal:
    """A person at a terminal: a process with a session and a controlling terminal of its own, and no ties to this one."""

    def __init__(self, argv: list[str], env: dict[str, str]) -> None:
        self.seen = b""
        self._master, slave = pty.openpty()
        # A program does the forking: this process has gRPC's threads in it, and must not.
        subprocess.run(
            [sys.executable, "-S", "-c", ALONE, *argv], stdin=slave, stdout=slave, stderr=slave, env=env, check=True
        )
        os.close(slave)

    def read_until(self, text: bytes) -> bytes:
        deadline = time.monotonic() + PATIENCE
        while text not in self.seen:
            assert time.monotonic() < deadline, self.seen
            if not self._more():
                break
        assert text in self.seen, self.seen
        return self.seen

    def type(self, text: bytes) -> None:
        os.write(self._master, text + b"\n")

    def finish(self) -> bytes:
        """Everything it said, after it has ended."""
        deadline = time.monotonic() + PATIENCE
        while self._more():
            assert time.monotonic() < deadline, self.seen
        os.close(self._master)
        return self.seen

    def _more(self) -> bool:
        if not select.select([self._master], [], [], 1.0)[0]:
            return True
        try:
            data = os.read(self._master, 65536)
        except OSError:  # nobody holds the other end any more
            return False
        self.seen += data
        return bool(data)


def decide_at_terminal(atoll: Atoll, approval: str, *flags: str) -> bytes:
    """Do what a person does: read the number off the screen and type it."""
    screen = Terminal(atoll.argv("sandbox", "approve", approval, *flags), atoll.env)
    shown = screen.read_until(b"to confirm: ")
    found = re.search(rb"Type (\d{6}) to confirm", shown)
    assert found is not None
    screen.type(found[1])
    return screen.finish()
