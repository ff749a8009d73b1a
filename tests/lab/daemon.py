"""A real daemon as a process of its own, and a small HTTP client that hides nothing."""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from lab import probes
from lab.sandboxes import CONTAINER, SOURCE
from lab.unix_http import UnixConnection
from lab.waiting import PATIENCE, until

TINY = {"limits": {"memory_mb": 256, "pids": 128, "disk_mb": 64}}


class Failed(Exception):
    """An error answer."""

    def __init__(self, status: int, error: dict[str, Any]) -> None:
        super().__init__(f"{status} {error}")
        self.status, self.error, self.code = status, error, error["code"]


class DaemonProcess:
    """A daemon on a state directory of its own."""

    def __init__(self, config: str = "") -> None:
        self.home = Path(tempfile.mkdtemp(prefix="atl-", dir="/tmp"))
        chosen = "" if "[sandboxes]" in config else CONTAINER
        (self.home / "config.toml").write_text(config + chosen)
        probes.give(self.home)
        self.process: subprocess.Popen[bytes] | None = None
        self.options: list[str] = []

    def start(self) -> None:
        env = {**os.environ, "PYTHONPATH": SOURCE}
        argv = [sys.executable, "-m", "atoll.server.daemon", "--home", str(self.home), *self.options]
        with open(self.home / "stderr", "ab") as err:
            self.process = subprocess.Popen(argv, env=env, stdin=subprocess.DEVNULL, stdout=err, stderr=err)
        until(self.reachable, "the daemon serves")

    def reachable(self) -> bool:
        assert self.process is not None
        assert self.process.poll() is None, (self.home / "stderr").read_text()
        try:
            UnixConnection(self.home / "daemon.sock").connect()
        except OSError:
            return False
        return True

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait(PATIENCE)

    def terminate(self) -> int:
        assert self.process is not None
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(PATIENCE)

    def close(self) -> None:
        """Destroy everything and leave no file."""
        if self.process is None or self.process.poll() is not None:
            self.start()
        try:
            self.post("/v1/daemon/stop", {"force": True})
            assert self.process is not None
            self.process.wait(PATIENCE)
        finally:
            assert self.process is not None
            self.process.kill()
            self.process.wait(PATIENCE)
        probes.keep(self.home)
        shutil.rmtree(self.home)

    # Asking

    def raw(self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None) -> tuple[Any, bytes]:
        connection = UnixConnection(self.home / "daemon.sock")
        try:
            connection.request(method, path, body, headers or {})
            response = connection.getresponse()
            return response, response.read()
        finally:
            connection.close()

    def ask(self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None) -> Any:
        response, data = self.raw(method, path, body, headers)
        answer = json.loads(data)
        if response.status >= 400:
            raise Failed(response.status, answer["error"])
        return answer

    def get(self, path: str) -> Any:
        return self.ask("GET", path)

    def post(self, path: str, fields: dict[str, Any] | None = None) -> Any:
        return self.ask("POST", path, json.dumps(fields or {}), {"Content-Type": "application/json"})

    def delete(self, path: str) -> Any:
        return self.ask("DELETE", path)

    def create(self, **fields: Any) -> "Box":
        return Box(self, self.post("/v1/sandboxes", {**TINY, **fields})["id"])

    def stream(self, path: str, fields: dict[str, Any] | None = None) -> Iterator[tuple[int, bytes]]:
        """Frames, keepalives left out."""
        connection = UnixConnection(self.home / "daemon.sock")
        headers = {"Accept": "application/x-atoll-frames"}
        try:
            connection.request(
                "GET" if fields is None else "POST", path, json.dumps(fields) if fields else None, headers
            )
            response = connection.getresponse()
            if response.status >= 400:
                raise Failed(response.status, json.loads(response.read())["error"])
            while head := response.read(5):
                payload = response.read(int.from_bytes(head[1:], "big"))
                if head[0]:
                    yield head[0], payload
        finally:
            connection.close()


@contextmanager
def running_daemon(config: str = "") -> Iterator[DaemonProcess]:
    """A daemon for one `with`, of which nothing is left afterwards."""
    if os.geteuid() != 0:
        pytest.skip("needs root")
    made = DaemonProcess(config)
    made.start()
    yield made
    made.close()


class Box:
    """A sandbox by its REST routes."""

    def __init__(self, daemon: DaemonProcess, sandbox: str) -> None:
        self.daemon, self.id = daemon, sandbox
        self.path = f"/v1/sandboxes/{sandbox}"

    def info(self) -> Any:
        return self.daemon.get(self.path)

    def exec(self, command: str | list[str], **fields: Any) -> Any:
        what = {"command": command} if isinstance(command, str) else {"argv": command}
        return self.daemon.post(f"{self.path}/exec", {**what, **fields})

    def run(self, code: str, language: str = "python", **fields: Any) -> Any:
        return self.daemon.post(f"{self.path}/run", {"code": code, "language": language, **fields})

    def background(self, command: str, **fields: Any) -> str:
        return str(self.exec(command, background=True, **fields)["command_id"])

    def command(self, command: str, query: str = "") -> Any:
        return self.daemon.get(f"{self.path}/commands/{command}{query}")

    def ended(self, command: str) -> Any:
        return until(lambda: (c := self.command(command)) and c["status"] != "running" and c, "the command ends")

    def files(self, verb: str, **fields: Any) -> Any:
        return self.daemon.post(f"{self.path}/files/{verb}", fields)

    def write(self, path: str, data: bytes, query: str = "") -> Any:
        return self.daemon.ask("PUT", f"{self.path}/files?path={path}{query}", data)

    def read(self, path: str, query: str = "") -> bytes:
        response, data = self.daemon.raw("GET", f"{self.path}/files?path={path}{query}")
        if response.status >= 400:
            raise Failed(response.status, json.loads(data)["error"])
        return data

    def destroy(self) -> Any:
        return self.daemon.delete(self.path)
