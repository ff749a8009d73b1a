"""Some sandboxes that all do one thing, and the neighbour that is measured beside them."""

import contextlib
import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from atoll.egress import Egress
from lab.broker_floods import NEAR_NAME
from lab.internet import BROKER_UID, Inside, World

HERE = Path(__file__).parent
DNS_SERVER = "203.0.113.54"
BLOCK = 25  # samples; the 99th of a hundred is the last of them
_SETTLE_SECONDS = 0.7
HOSTS = (
    "*.flood.example",
    *(f"*.flood.example:{port}" for port in (7071, 7072, 7073)),
    "POST http://*.flood.example:7070/",
)


@dataclass(slots=True)
class Waits:
    """The neighbour's waits in milliseconds: blocks beside programs that only compute, and blocks beside a flood, in turns."""

    computing: list[list[float]] = field(default_factory=list)
    flooding: list[list[float]] = field(default_factory=list)

    @property
    def worst(self) -> float:
        """How many times longer the last of a block was beside the flood, in the median of the pairs of blocks."""
        return median(max(b) / max(a) for a, b in zip(self.computing, self.flooding, strict=True))

    @property
    def usual(self) -> float:
        """The same for the median of each block."""
        return median(median(b) / median(a) for a, b in zip(self.computing, self.flooding, strict=True))

    def __str__(self) -> str:
        def tell(blocks: list[list[float]]) -> str:
            return ", ".join(f"{median(block):.1f}/{max(block):.1f}" for block in blocks)

        return (
            f"ratio of p99 {self.worst:.2f}, of medians {self.usual:.2f}; median/last in ms of each block: "
            f"computing {tell(self.computing)}; flooding {tell(self.flooding)}"
        )


class FairWorld(World):
    """Name servers and hosts are processes of their own, so that what floods reach slows neither test nor neighbour."""

    def __init__(self, sandboxes: int) -> None:
        self._stack = contextlib.ExitStack()
        super().__init__()
        try:
            self.boxes = [self._stack.enter_context(self.sandbox(*HOSTS)) for _ in range(sandboxes)]
            self.near = self._stack.enter_context(self.sandbox(f"GET http://{NEAR_NAME}:8081/"))
            self._programs = [self._start(box) for box in self.boxes]
            self._probe = self._start(self.near)
        except BaseException:
            self.close()
            raise

    def start_egress(self) -> Egress:
        for kind in ("names", "near", "far"):
            command = [sys.executable, str(HERE / "broker_internet.py"), str(self.inet_net), kind, DNS_SERVER]
            server = self._run(command, self.inet_net)
            assert server.stdout is not None and server.stdout.readline() == b"ready\n"
        return self.call(
            Egress.start(self.state, BROKER_UID, host_net=self.host, servers=[(DNS_SERVER, 53)], hosts_file="")
        )

    def close(self) -> None:
        self._stack.close()
        super().close()

    def _run(self, command: list[str], net: int) -> "subprocess.Popen[bytes]":
        process = subprocess.Popen(command, pass_fds=[net], stdin=subprocess.PIPE, stdout=subprocess.PIPE)

        def end() -> None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.communicate(timeout=0.2)  # the end of its input ends it, and its child
            process.kill()
            process.communicate()

        self._stack.callback(end)
        return process

    def _start(self, box: Inside) -> "subprocess.Popen[bytes]":
        return self._run([sys.executable, str(HERE / "broker_floods.py"), str(box.net), box.link.gateway], box.net)

    def act(self, kind: str) -> None:
        """Let all of them do this from now on."""
        for program in self._programs:
            tell(program, kind)
        for program in self._programs:
            assert program.stdout is not None
            said = program.stdout.readline()
            assert said == b"begun\n", said

    def measure(self, samples: int = BLOCK) -> list[float]:
        """Milliseconds of the neighbour's lookups with a GET."""
        tell(self._probe, str(samples))
        assert self._probe.stdout is not None
        found = json.loads(self._probe.stdout.readline())
        assert not found["failed"], f"the neighbour was not served: {found['failed']}"
        lookup, connect, answer = (max(times) * 1e3 for times in zip(*found["steps"], strict=True))
        show(
            f"slowest lookup {lookup:.1f} ms, connect {connect:.1f}, answer {answer:.1f}; load {os.getloadavg()[0]:.1f}"
        )
        return [seconds * 1e3 for seconds in found["took"]]

    def used(self) -> float:
        """Seconds of processor time that the broker has spent on the sandboxes that flood."""
        return sum(box.counters()["seconds"] for box in self.boxes)

    def compare(self, kind: str, pairs: int, waits: Waits) -> Waits:
        """Add pairs of blocks: beside programs that only compute, and then beside the flood."""
        for _ in range(pairs):
            for what, blocks in (("burn", waits.computing), (kind, waits.flooding)):
                self.act(what)
                time.sleep(_SETTLE_SECONDS)
                blocks.append(self.measure())
        self.act("stop")
        return waits


def tell(program: "subprocess.Popen[bytes]", word: str) -> None:
    assert program.stdin is not None
    program.stdin.write(f"{word}\n".encode())
    program.stdin.flush()


def show(text: str) -> None:
    """Tell a figure, where somebody asked for them."""
    if os.environ.get("ATOLL_FAIRNESS"):
        print(text, file=sys.__stdout__, flush=True)
