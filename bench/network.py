"""The broker's price: time to first byte, throughput and many connections at once, against the same without it.

The server is a thread of this process on loopback; sandboxes reach it as `host.atoll.internal`, so every byte goes through the
veth, nftables and the broker. The client is one program, run on the bare host and in the sandbox, and does its own timing.
"""

import json
import socket
import threading

from atoll import Sandbox
from bench import programs
from bench.lab import Lab
from bench.measure import Contender

BLOCK = bytes(1 << 20)
CLIENT = """
import json, socket, sys, threading, time
host, port, mode = socket.gethostbyname(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
def get(size):
    start = time.perf_counter()
    with socket.create_connection((host, port)) as s:
        s.sendall(b"%d\\n" % size)
        first, got = None, 0
        while got < size:
            data = s.recv(1 << 20)
            if not data:
                raise SystemExit("cut short")
            first = first or time.perf_counter() - start
            got += len(data)
    return first, time.perf_counter() - start
get(1)
if mode == "first":
    print(json.dumps(sorted(get(1)[0] for _ in range(50))[25]))
elif mode == "bulk":
    print(json.dumps(get(256 << 20)[1]))
else:
    done = []
    def one():
        done.append(get(1 << 20))
    threads = [threading.Thread(target=one) for _ in range(200)]
    start = time.perf_counter()
    for t in threads: t.start()
    for t in threads: t.join()
    assert len(done) == 200, len(done)
    print(json.dumps(time.perf_counter() - start))
"""


class Server:
    """Answers a number and a newline with that many bytes."""

    def __init__(self) -> None:
        self._socket = socket.create_server(("127.0.0.1", 0), backlog=512)
        self.port: int = self._socket.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with connection:
            try:
                left = int(connection.makefile("rb").readline())
                while left > 0:
                    left -= connection.send(BLOCK[:left])
            except (OSError, ValueError):
                return

    def close(self) -> None:
        self._socket.close()


def through(lab: Lab, mode: str) -> list[Contender]:
    server = Server()
    lab.row.callback(server.close)

    def bare() -> float:
        argv = [programs.PYTHON, "-c", CLIENT, "127.0.0.1", str(server.port), mode]
        return float(json.loads(programs.run(argv).stdout))

    found = [Contender("direct, bare host", bare)]
    for runtime in lab.runtimes:
        box = Sandbox(
            home=lab.home, runtime=runtime, hosts=[], host_ports=[server.port], cpus=2, pids=1024, memory_mb=2048
        )
        lab.row.callback(box.destroy)

        def inside(box: Sandbox = box) -> float:
            argv = ["python3", "-c", CLIENT, "host.atoll.internal", str(server.port), mode]
            answer = box.exec(argv, timeout=300)
            if answer.exit_code != 0:
                raise RuntimeError(f"exit {answer.exit_code}: {answer.stderr.strip()[-200:]}")
            return float(json.loads(answer.stdout))

        found.append(Contender(f"atoll {runtime}", inside))
    return found


def refused(lab: Lab) -> list[Contender]:
    """How soon a program learns that a host is not allowed; resolving the name is part of it."""
    code = "import socket, time; t = time.perf_counter()\n" + (
        "try: socket.create_connection(('example.com', 443)); raise SystemExit('connected')\n"
        "except OSError: print(time.perf_counter() - t)"
    )
    found = []
    for runtime in lab.runtimes:
        box = Sandbox(home=lab.home, runtime=runtime)
        lab.row.callback(box.destroy)

        def inside(box: Sandbox = box) -> float:
            answer = box.exec(["python3", "-c", code])
            if answer.exit_code != 0:
                raise RuntimeError(answer.stderr.strip()[-200:])
            return float(answer.stdout)

        found.append(Contender(f"atoll {runtime}", inside))
    return found
