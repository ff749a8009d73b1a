"""What the behaviour and threat tests share: a daemon with a home of its own, sandboxes on each runtime, a census of the machine.

Everything goes through the public faces (`from atoll import Sandbox`, the CLI as a process, HTTP on the daemon's socket).
Waits are bounded and follow events; nothing here measures time.
"""

import hashlib
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import atoll
from lab import probes
from lab.unix_http import UnixConnection
from lab.waiting import PATIENCE, until

LONG = bool(os.environ.get("ATOLL_TEST_LONG"))
SOURCE = os.path.dirname(os.path.dirname(os.path.abspath(atoll.__file__)))
PYTHON_PATHS = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path and path != SOURCE]
RUNTIMES = tuple(os.environ.get("ATOLL_TEST_RUNTIMES", "container,gvisor").replace(",", " ").split())
ONE_RUNTIME = RUNTIMES if LONG else RUNTIMES[:1]  # for clients whose calls other tests make on every runtime
ENGINE = os.environ.get(
    "ATOLL_TEST_ENGINE", ""
)  # of the container runtime; tests/backend runs some tests again with it
# For daemons whose tests do not look at the runtime: those that do name it, and tests/behaviour has every runtime. In the long run
# it is `auto` as everywhere, so gVisor where it works.
CONTAINER = "" if LONG else '[sandboxes]\nruntime = "container"\n'
NO_SPARES = "[pool]\nfloor = 0\nceiling = 0\n"  # tests/pool has the warm ones; here a census must count what is used
ROOTLESS = (
    os.geteuid() != 0
)  # tests/rootless runs these tests again as an ordinary user, with and without control groups
HELD = not ROOTLESS or bool(os.environ.get("ATOLL_TEST_DELEGATED"))  # whether memory, CPU and processes can be limited
SEVERAL_IDS = HELD  # tests/rootless gives a user subordinate ids together with control groups, or neither
SMALL: dict[str, Any] = {"network": False}
if HELD:
    SMALL |= {"memory_mb": 256, "pids": 128}
if not ROOTLESS:
    SMALL |= {"disk_mb": 64}  # an ordinary user's disk of a given size is in memory, and ends with a stop


def reachable(host: str) -> bool:
    """Whether this machine gets out to a host."""
    try:
        socket.create_connection((host, 443), 10).close()
    except OSError:
        return False
    return True


class Lab:
    """One home, the daemon on it, and ways to ask it."""

    def __init__(self, config: str = NO_SPARES) -> None:
        self.home = tempfile.mkdtemp(prefix="atb-")
        chosen = f'[backend]\ncontainer_engine = "{ENGINE}"\n' if ENGINE and "[backend]" not in config else ""
        (Path(self.home) / "config.toml").write_text(config + chosen)
        probes.give(self.home)
        if images := os.environ.get("ATOLL_TEST_IMAGES"):  # an ordinary user's host image has every directory of /usr
            (Path(self.home) / "images").symlink_to(images)
        self.env = {k: v for k, v in os.environ.items() if not k.startswith(("ATOLL_", "K8E_", "AGENTKERNEL_"))}
        self.env.update(ATOLL_HOME=self.home, PYTHONPATH=os.pathsep.join([SOURCE, *PYTHON_PATHS]))
        self.mark = hashlib.sha256(os.fsencode(os.path.abspath(self.home))).hexdigest()[:8]
        self._runtimes: dict[str, Any] | None = None

    def cli(
        self, *words: str, stdin: bytes = b"", env: dict[str, str] | None = None
    ) -> "subprocess.CompletedProcess[bytes]":
        """`atoll` as people call it."""
        return subprocess.run(
            [sys.executable, "-m", "atoll", *words], input=stdin, capture_output=True, timeout=2 * PATIENCE,
            env={**self.env, **(env or {})},
        )  # fmt: skip

    def ask(self, method: str, path: str, body: Any = None) -> tuple[int, Any]:
        """One HTTP request to the daemon, its status and its JSON (or bytes)."""
        connection = UnixConnection(f"{self.home}/daemon.sock")
        try:
            data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
            connection.request(method, path, data)
            response = connection.getresponse()
            raw = response.read()
            is_json = (response.getheader("content-type") or "").startswith("application/json")
            return response.status, json.loads(raw) if is_json else raw
        finally:
            connection.close()

    def start(self) -> int:
        """Make sure that the daemon runs; its process id."""
        atoll.Sandbox.list(home=self.home)
        return int(self.ask("GET", "/v1/health")[1]["pid"])

    def peak_memory(self) -> int:
        """The most bytes that were ever resident in the daemon."""
        pid = self.ask("GET", "/v1/health")[1]["pid"]
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM"))

    def works(self, runtime: str) -> str:
        """Empty when this machine has the runtime, else why not. Its probe has really started a sandbox."""
        if (runtime,) == RUNTIMES:
            return ""  # asked for by name: if it does not work, the tests say so
        if self._runtimes is None:
            self.start()
            answer = self.ask("GET", "/v1/runtimes")[1]["runtimes"]
            self._runtimes = {item["name"]: item for item in answer}
            probes.keep(self.home)
        found = self._runtimes.get(runtime)
        if found is None:
            return f"this atoll does not know {runtime}"
        return "" if found["works"] else str(found.get("why") or "does not work")

    def create(self, **options: Any) -> atoll.Sandbox:
        return atoll.Sandbox.create(home=self.home, **{**SMALL, **options})

    @contextmanager
    def sandbox(self, **options: Any) -> Iterator[atoll.Sandbox]:
        made = self.create(**options)
        try:
            yield made
        finally:
            made.destroy()
            made.close()

    def close(self) -> None:
        """End everything; a leak here fails the session."""
        try:
            self.cli("daemon", "stop", "--force")
            until(
                lambda: not any(left(self.mark, self.home).values()), f"nothing is left: {left(self.mark, self.home)}"
            )
        finally:
            shutil.rmtree(self.home, ignore_errors=True)


def left(mark: str, home: str) -> dict[str, list[str]]:
    """Everything on this machine that bears the mark of a home: processes, mounts, loop devices, groups, directories."""
    processes = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and f"/atoll/{mark}" in _text(entry / "cgroup") and alive(int(entry.name)):
            processes.append(f"{entry.name} {_text(entry / 'comm').strip()}")
    loops = [str(p) for p in Path("/sys/block").glob("loop*/loop/backing_file") if _text(p).startswith(home)]
    return {
        "processes": processes,
        "mounts": [line for line in _text(Path("/proc/self/mountinfo")).splitlines() if f"{home}/" in line],
        "loops": loops,
        "groups": [str(path) for path in groups(mark)],
        "directories": [str(p) for top in ("run", "boxes") for p in Path(home, top).glob("*") if len(p.name) == 20],
    }


def groups(mark: str, sandbox: str = "") -> list[Path]:
    """The control groups of a home's sandboxes, or of one, in every hierarchy. Others come and go: nothing else is walked."""
    found: list[Path] = []
    for mount in (Path("/sys/fs/cgroup"), *Path("/sys/fs/cgroup").iterdir()):
        for top in (mount, mount / os.environ.get("ATOLL_TEST_DELEGATED", "")):
            try:
                found += [p for p in (top / "atoll" / mark).iterdir() if p.is_dir() and sandbox in p.name]
            except OSError:
                continue
    return list(dict.fromkeys(found))


def group_values(mark: str, sandbox: str, name: str) -> list[str]:
    """What this file of the sandbox's groups says, wherever it exists."""
    return [text for group in groups(mark, sandbox) if (text := _text(group / name))]


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def alive(pid: int) -> bool:
    """Whether this process runs. A dead one whose parent, a daemon that was killed, cannot collect it any more does not."""
    fields = _text(Path(f"/proc/{pid}/stat")).rpartition(")")[2].split()
    return bool(fields) and fields[0] not in "ZX"


def descriptors(pid: int) -> int:
    """Open descriptors of a process, without the transcripts of the last sandboxes, of which the daemon keeps a few at hand."""
    found = 0
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        try:
            found += "/transcripts/" not in os.readlink(entry)
        except OSError:
            continue
    return found
