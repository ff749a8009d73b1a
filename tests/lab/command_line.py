"""The program as people call it: a process with an environment of its own."""

import json
import os
import pty
import select
import subprocess
import sys
import termios
import time
from typing import Any

from lab.sandboxes import SOURCE

WAIT = 240
MAIN = "import sys; sys.argv[0] = {name!r}; from atoll.cli import main; sys.exit(main())"
OURS = ("ATOLL_", "K8E_", "AGENTKERNEL_", "DSH_", "KUBE")


def environment(home: str, **more: str) -> dict[str, str]:
    """This process's environment without settings of the program, and a home of its own."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(OURS)}
    runtime = os.environ.get("ATOLL_RUNTIME", "container")  # behaviour tests cover every runtime
    return {**kept, "ATOLL_HOME": home, "PYTHONPATH": SOURCE, "ATOLL_RUNTIME": runtime, **more}


class Done:
    """A finished call."""

    def __init__(self, code: int, stdout: bytes, stderr: bytes) -> None:
        self.code = code
        self.stdout = stdout
        self.stderr = stderr

    @property
    def json(self) -> Any:
        """The one line of JSON that is all of its output."""
        lines = self.stdout.splitlines()
        assert len(lines) == 1, (self.stdout, self.stderr)
        return json.loads(lines[0])

    @property
    def text(self) -> str:
        return self.stdout.decode()

    def __repr__(self) -> str:
        return f"exit {self.code}\nstdout: {self.stdout[:3000]!r}\nstderr: {self.stderr[:3000]!r}"


class Cli:
    """Calls the program by one of its names, with one home and one working directory."""

    def __init__(self, home: str, directory: str | None = None, name: str = "atoll", **env: str) -> None:
        self.home = home
        self.directory = directory
        self.name = name
        self.env = environment(home, **env)

    def command(self, *words: str, name: str = "") -> list[str]:
        return [sys.executable, "-c", MAIN.format(name=f"/usr/bin/{name or self.name}"), *words]

    def __call__(
        self, *words: str, name: str = "", stdin: bytes | None = b"", env: dict[str, str] | None = None
    ) -> Done:
        done = subprocess.run(
            self.command(*words, name=name), input=stdin or b"", capture_output=True, timeout=WAIT, cwd=self.directory,
            env={**self.env, **(env or {})},
        )  # fmt: skip
        assert b"Traceback" not in done.stderr + done.stdout, done
        return Done(done.returncode, done.stdout, done.stderr)

    def popen(self, *words: str, **options: Any) -> "subprocess.Popen[bytes]":
        env = {**self.env, **options.pop("env", {})}
        cwd = options.pop("cwd", None) or self.directory
        return subprocess.Popen(self.command(*words), env=env, cwd=cwd, **options)

    def ok(self, *words: str, **options: Any) -> Any:
        """The JSON of a call that must succeed."""
        done = self(*words, **options)
        assert done.code == 0, done
        return done.json

    def at_terminal(self, *words: str, env: dict[str, str] | None = None, cwd: str | None = None) -> tuple[int, str]:
        """The exit code, and what a person sees."""
        master, slave = pty.openpty()
        termios.tcsetwinsize(slave, (24, 100))
        process = self.popen(*words, stdin=subprocess.DEVNULL, stdout=slave, stderr=slave, env=env or {}, cwd=cwd)
        os.close(slave)
        seen, end = b"", time.monotonic() + WAIT
        try:
            while time.monotonic() < end:
                if not select.select([master], [], [], 1.0)[0]:
                    continue
                try:
                    piece = os.read(master, 65536)
                except OSError:  # how the end looks on a terminal
                    break
                if not piece:
                    break
                seen += piece
            return process.wait(WAIT), seen.decode("utf-8", "replace").replace("\r\n", "\n")
        finally:
            if process.poll() is None:
                process.kill()
                process.wait(WAIT)
            os.close(master)
