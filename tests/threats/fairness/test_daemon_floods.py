"""Twenty callers flood the daemon, each in another way; a neighbour's commands take at most three times what they take
beside twenty sandboxes that only burn their share of the CPU.

Both are measured in the same run, in short blocks that take turns, so that what else the machine does counts for both. A
row fails when three measurements in a row are beyond the bound: a flood does the same every time, other load does not.
"""

import json
import math
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from lab.daemon import PATIENCE, Box, DaemonProcess, UnixConnection, until
from lab.floods import COUNTS, MANY_FILES, open_counts
from lab.sandboxes import LONG, RUNTIMES

pytestmark = [pytest.mark.serial, pytest.mark.skipif(not LONG, reason="only in the long run: eight minutes")]

TESTS = Path(__file__).parents[2]
CALLERS = 20
BOUND = 3.0
ROUNDS, EXECS = 3, 8  # a block is so many commands, and more until the flood has done so much beside them:
LEAST = 4
TRIES = 3
KINDS = (
    "small_execs", "large_outputs", "lists", "greps", "uploads", "large_json", "connections", "handshakes", "streams",
    "exposed",
)  # fmt: skip
CLIENTS = 2  # processes that flood, so that one Python is not all there is
BURN = """
import os, time
while True:
    until = time.monotonic() + 0.2
    if os.path.exists('/workspace/burn'):
        while time.monotonic() < until: pass
    else: time.sleep(0.05)
"""
FILL = f"""
import os
os.mkdir('/workspace/many')
for n in range({MANY_FILES}):
    with open(f'/workspace/many/{{n:05}}', 'w') as f: f.write('a line of text\\n' * 3)
"""


class Street(DaemonProcess):
    """A daemon with twenty sandboxes of which each can burn or be flooded, and a neighbour's."""

    def __init__(self) -> None:
        super().__init__("[pool]\nfloor = 0\nceiling = 0\n")
        self.options = ["--grpc", "127.0.0.1:0"]
        self.boxes: list[Box] = []
        self.did: dict[str, int] = {}  # how often each flood has done what it does while it was measured

    def furnish(self) -> None:
        runtime = RUNTIMES[0]
        self.neighbour = self.create(runtime=runtime)
        self.boxes = [self.create(runtime=runtime) for _ in range(CALLERS)]
        for box in self.boxes:
            assert box.exec(["python3", "-c", FILL])["exit_code"] == 0
            box.exec(["python3", "-c", BURN], background=True)
        server = self.boxes[0]
        server.background("cd /workspace && echo hi > index.html && exec python3 -m http.server 8000")
        until(lambda: server.exec("exec 3<>/dev/tcp/127.0.0.1/8000")["exit_code"] == 0, "the server listens")
        quotas = {"read_burst": 10**6, "read_rate": 10**6, "write_burst": 10**6, "write_rate": 10**6}
        keys = [
            self.post("/v1/keys", {"name": f"k{n}", "scopes": ["use"], "quotas": quotas})["key"] for n in range(CALLERS)
        ]
        until((self.home / "grpc.endpoint").exists, "gRPC listens")
        settings = {
            "home": str(self.home),
            "sandboxes": [box.id for box in self.boxes],
            "port": int((self.home / "grpc.endpoint").read_text().split()[0].rpartition(":")[2]),
            "ca": (self.home / "tls" / "sandbox-ca.crt").read_text(),
            "keys": keys,
            "url": self.post(f"{server.path}/exposures", {"port": 8000})["url"] + "index.html",
        }
        (self.home / "floods.json").write_text(json.dumps(settings))

    @contextmanager
    def burning(self) -> Iterator[None]:
        for box in self.boxes:
            box.write("/workspace/burn", b"")
        try:
            yield
        finally:
            for box in self.boxes:
                box.files("remove", path="/workspace/burn")

    @contextmanager
    def flooded(self, kind: str) -> Iterator[Callable[[], int]]:
        """A flood that is under way, and a function that says how much it has done since then."""
        settings = str(self.home / "floods.json")
        for share in range(CLIENTS):
            Path(f"{settings}.{share}").write_bytes(bytes(COUNTS.size))
        counts = [open_counts(settings, share) for share in range(CLIENTS)]
        clients = [
            subprocess.Popen([sys.executable, "-m", "lab.floods", kind, settings, str(share), str(CLIENTS)], cwd=TESTS)
            for share in range(CLIENTS)
        ]

        def did(part: int | None = None) -> int:
            return sum(sum(COUNTS.unpack_from(one)) for one in counts[slice(part, None if part is None else part + 1)])

        try:
            for share, client in enumerate(clients):
                deadline = time.monotonic() + PATIENCE
                while did(share) < 2:
                    assert time.monotonic() < deadline and client.poll() is None, f"{kind} does not begin"
                    time.sleep(0.01)
            before = did()
            yield lambda: did() - before
            assert all(client.poll() is None for client in clients), f"{kind} ended by itself"
            self.did[kind] = self.did.get(kind, 0) + did() - before
        finally:
            for client in clients:
                client.kill()
                client.wait()

    def beside_burners(self) -> list[float]:
        with self.burning():
            return self.measure()

    def beside_flood(self, kind: str) -> list[float]:
        """Measure until the flood has done enough beside it, so that no block counts that it left alone."""
        with self.flooded(kind) as did:
            took = self.measure()
            deadline = time.monotonic() + PATIENCE
            while did() < LEAST:
                assert time.monotonic() < deadline, f"{kind} does nothing"
                took += self.measure(1)
            return took

    def measure(self, count: int = EXECS) -> list[float]:
        """How long each of so many commands of the neighbour takes, in milliseconds."""
        connection = UnixConnection(self.home / "daemon.sock")
        took = []
        try:
            for _ in range(count):
                begun = time.perf_counter()
                connection.request("POST", f"{self.neighbour.path}/exec", b'{"argv": ["/bin/true"]}')
                answer = connection.getresponse()
                said = answer.read()
                took.append((time.perf_counter() - begun) * 1000)
                assert answer.status == 200 and json.loads(said)["exit_code"] == 0, said
        finally:
            connection.close()
        return took


@pytest.fixture(scope="module")
def street() -> Iterator[Street]:
    made = Street()
    made.start()
    made.furnish()
    made.measure(5)
    yield made
    made.close()


def p99(took: list[float]) -> float:
    return sorted(took)[math.ceil(0.99 * len(took)) - 1]


@pytest.mark.parametrize("kind", KINDS)
def test_a_neighbours_commands_go_on(street: Street, kind: str) -> None:
    ratios = list[float]()
    while len(ratios) < TRIES and (not ratios or ratios[-1] > BOUND):
        beside, flooded = list[float](), list[float]()
        for _ in range(ROUNDS):
            beside += street.beside_burners()
            flooded += street.beside_flood(kind)
        ratios.append(p99(flooded) / p99(beside))
        print(f"{kind:14} p99 {p99(flooded):7.1f} ms, beside burners {p99(beside):7.1f} ms, done {street.did[kind]}")
    assert street.did[kind] >= ROUNDS * LEAST, "there was a flood"
    assert ratios[-1] <= BOUND, f"a neighbour waits too long, times {ratios}"
