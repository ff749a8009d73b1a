"""`atoll mcp` as agents start it: a process on pipes, and its HTTP listener."""

import json
import queue
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from lab.sandboxes import PATIENCE, Lab, until

AS = "import sys; sys.argv[0] = {name!r}; from atoll.cli import main; sys.exit(main())"


class Wire:
    """A client that speaks raw JSON-RPC lines, well-formed or not."""

    def __init__(
        self,
        lab: Lab,
        *words: str,
        name: str = "atoll",
        argv: list[str] | None = None,
        cwd: str | None = None,
        **env: str,
    ) -> None:
        own = {**lab.env, "ATOLL_RUNTIME": "container", **env}
        command = argv or [sys.executable, "-c", AS.format(name=f"/usr/bin/{name}"), *words]
        program = shutil.which(command[0], path=own["PATH"])
        assert program is not None
        self.process = subprocess.Popen(
            [program, *command[1:]],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd=cwd,
            env=own,
        )
        self.notes: list[dict[str, Any]] = []
        self._lines: queue.Queue[bytes] = queue.Queue()
        self._answers: dict[Any, Any] = {}
        self._next = 0
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.put(line)
        self._lines.put(b"")

    def send(self, message: Any) -> None:
        raw = message if isinstance(message, bytes) else json.dumps(message).encode()
        assert self.process.stdin is not None
        self.process.stdin.write(raw + b"\n")
        self.process.stdin.flush()

    def receive(self) -> Any:
        line = self._lines.get(timeout=2 * PATIENCE)
        assert line, "the server has closed its output"
        return json.loads(line)

    def start(self, method: str, params: Any = None) -> int:
        self._next += 1
        self.send({"jsonrpc": "2.0", "id": self._next, "method": method, "params": params or {}})
        return self._next

    def wait(self, request: int | str) -> Any:
        while request not in self._answers:
            message = self.receive()
            if "method" in message:
                self.notes.append(message)
            else:
                self._answers[message.get("id")] = message
        return self._answers.pop(request)

    def ask(self, method: str, params: Any = None) -> Any:
        return self.wait(self.start(method, params))

    def call(self, tool: str, progress: str | None = None, **arguments: Any) -> Any:
        """The result of a tool."""
        params: dict[str, Any] = {"name": tool, "arguments": arguments}
        if progress:
            params["_meta"] = {"progressToken": progress}
        answer = self.ask("tools/call", params)
        assert "result" in answer, answer
        return answer["result"]

    def close(self) -> int:
        if self.process.stdin is not None and not self.process.stdin.closed:
            self.process.stdin.close()
        return self.process.wait(2 * PATIENCE)

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(PATIENCE)


@pytest.fixture
def connect(lab: Lab) -> Iterator[Callable[..., Wire]]:
    made: list[Wire] = []

    def new(*words: str, **options: Any) -> Wire:
        made.append(Wire(lab, *(words or ("mcp",)), **options))
        return made[-1]

    yield new
    for wire in made:
        if wire.process.poll() is None:
            wire.kill()


@pytest.fixture(scope="module")
def k8e(lab: Lab) -> Iterator[Wire]:
    """One client of K8E's tools for a module."""
    wire = Wire(lab, "mcp")
    yield wire
    wire.close()


@pytest.fixture(scope="module")
def agentkernel(lab: Lab) -> Iterator[Wire]:
    wire = Wire(lab, "mcp", "server")
    yield wire
    wire.close()


class Door:
    """The HTTP listener."""

    def __init__(self, lab: Lab, *words: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "atoll", "mcp", "--http", "--http-addr", "127.0.0.1:0", *words],
            stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, env={**lab.env, "ATOLL_RUNTIME": "container"},
        )  # fmt: skip
        assert self.process.stderr is not None
        line = self.process.stderr.readline().decode()
        found = re.search(r"http://127\.0\.0\.1:(\d+)/mcp", line)
        assert found, line
        self.port = int(found[1])
        self.url = f"http://127.0.0.1:{self.port}/mcp"

    def close(self) -> None:
        self.process.terminate()
        self.process.wait(PATIENCE)


@pytest.fixture(scope="module")
def door(lab: Lab) -> Iterator[Door]:
    made = Door(lab, "--tools", "all")
    yield made
    made.close()


def text(result: Any) -> str:
    return "".join(block.get("text", "") for block in result["content"])


def living(lab: Lab) -> list[str]:
    return [one["id"] for one in lab.ask("GET", "/v1/sandboxes")[1]["sandboxes"]]


@pytest.fixture
def helpers() -> Any:
    """What tests use beside the fixtures (this directory is no package: `mcp` is the SDK's name)."""

    return SimpleNamespace(text=text, living=living, until=until, Wire=Wire, Door=Door)
