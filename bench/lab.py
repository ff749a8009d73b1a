"""Where the benchmark works: a daemon with a state directory of its own, sandboxes kept for several rows, and the cleaning."""

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TypeVar

from atoll import Sandbox
from atoll.client._sync.driver import Link
from atoll.client.calls import get, post
from bench import registry

ATOLL = [sys.executable, str(Path(__file__).parents[1] / "scripts" / "atoll")]  # what is installed as `atoll`
READY = 60.0
POOL_FULL = 10.0
ID_LENGTH = 20
T = TypeVar("T")

CONFIG = """
[sandboxes]
max_count = 3000

[images]
ca_file = "{ca}"
{more}
"""


class Lab:
    """One per run; as a context manager it leaves nothing on the machine."""

    def __init__(self, rounds: int, *, quick: bool = False, settings: str = "") -> None:
        self.rounds = rounds
        self.quick = quick
        self._settings = settings
        self.runtimes: list[str] = []
        self.work = Path(tempfile.mkdtemp(prefix="atoll-bench-"))
        self.home = str(self.work / "home")
        self.env = {**os.environ, "ATOLL_HOME": self.home}
        self.row = ExitStack()  # what the present row leaves to be cleaned
        self._run = ExitStack()
        self._kept: dict[str, Any] = {}
        self._live: dict[str, Sandbox] = {}

    def __enter__(self) -> "Lab":
        try:
            self._start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _start(self) -> None:
        os.makedirs(self.home, mode=0o711)
        config = Path(self.home, "config.toml")
        registry.make_certificate(self.work)
        config.write_text(CONFIG.format(ca=self.work / registry.CA, more=self._settings))
        config.chmod(0o600)
        with open(self.work / "serve.log", "wb") as log:
            daemon = subprocess.Popen(
                [*ATOLL, "serve", "--grpc", "127.0.0.1:0"],
                env=self.env, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip
        self._run.callback(self._stop, daemon)
        until = time.monotonic() + READY
        while not Path(self.home, "daemon.sock").exists() or not Path(self.home, "grpc.endpoint").exists():
            if daemon.poll() is not None or time.monotonic() > until:
                raise RuntimeError("the daemon did not start: " + (self.work / "serve.log").read_text()[-500:])
            time.sleep(0.05)
        link = Link(self.home)
        link.call(post("/v1/daemon/pin", {}))  # from now on there is a pool
        found = link.call(get("/v1/runtimes"))["runtimes"]
        self.runtimes = sorted(r["name"] for r in found if r["works"] and r["name"] in ("container", "gvisor"))

    def _stop(self, daemon: "subprocess.Popen[bytes]") -> None:
        stop = [*ATOLL, "daemon", "stop", "--force"]
        subprocess.run(stop, env=self.env, check=False, capture_output=True, timeout=300)
        try:
            daemon.wait(60)
        except subprocess.TimeoutExpired:
            daemon.kill()
            daemon.wait()

    def close(self) -> None:
        self.end_row()
        for box in self._live.values():
            box.close()
        self._run.close()
        shutil.rmtree(self.work, ignore_errors=True)

    def end_row(self) -> None:
        self.row.close()

    def at_end(self, clean: Callable[[], object]) -> None:
        """Do this when the whole run is over."""
        self._run.callback(clean)

    def once(self, key: str, make: Callable[[], T]) -> T:
        """A thing several rows need, made when first asked for."""
        if key not in self._kept:
            self._kept[key] = make()
        found: T = self._kept[key]
        return found

    def live(self, runtime: str) -> Sandbox:
        """A sandbox that is there already, without a network."""
        if runtime not in self._live:
            self._live[runtime] = Sandbox.create(home=self.home, runtime=runtime, network=False, cpus=2, memory_mb=2048)
        return self._live[runtime]

    def default_first(self) -> list[str]:
        """The runtimes that work here, the one a caller gets who names none first."""
        return sorted(self.runtimes, key=lambda runtime: runtime != "gvisor")

    def health(self) -> dict[str, Any]:
        found: dict[str, Any] = self.once("link", lambda: Link(self.home)).call(get("/v1/health"))
        return found

    def full_pool(self) -> None:
        """Wait until the pool has what it wants and what was destroyed is removed, so that a row about claims times claims."""
        until = time.monotonic() + POOL_FULL
        while time.monotonic() < until:
            health = self.health()
            pool = health["pool"]
            there = pool["ready"] + health["sandboxes"]
            if all(kind["ready"] >= kind["wanted"] for kind in pool["kinds"]) and self._occupied() <= there:
                return
            time.sleep(0.02)

    def _occupied(self) -> int:
        """How many sandboxes have a disk."""
        return sum(len(name) == ID_LENGTH for name in os.listdir(Path(self.home, "boxes")))
