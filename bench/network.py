"""The broker's price: time to first byte, throughput and many connections at once, against the same without it.

The server is a thread of this process on loopback; sandboxes reach it as `host.atoll.internal`, so every byte goes through the
veth, nftables and the broker. The client is one program, run on the bare host and in the sandbox.
"""

import json
import socket
import subprocess
import threading

from atoll import Sandbox
from bench import peers
from bench.measure import Contender, Row

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


def rows(home: str, runtime: str, rounds: int) -> list[Row]:
    """Run here and give back finished rows: the program inside does the timing."""
    server = Server()
    box = Sandbox(home=home, runtime=runtime, hosts=[], host_ports=[server.port], cpus=2, pids=1024)
    try:
        found = []
        for name, mode, size, goal in (
            ("first byte through the broker", "first", 0, None),
            ("throughput through the broker, 256 MiB", "bulk", 256 << 20, None),
            ("200 downloads of 1 MiB at once", "many", 200 << 20, None),
        ):
            bare = Contender("direct, bare host", lambda: None)
            inside = Contender(f"atoll {runtime}", lambda: None)
            row = Row(name, [bare, inside], max(3, rounds // 6), goal=goal, unit_bytes=size)
            for _ in range(row.rounds):
                argv = ["-c", CLIENT, "127.0.0.1", str(server.port), mode]
                done = subprocess.run([peers.HOST_PYTHON, *argv], capture_output=True, text=True)
                _keep(bare, done.returncode, done.stdout, done.stderr)
                argv[2] = "host.atoll.internal"
                answer = box.exec(["python3", *argv], timeout=300)
                _keep(inside, answer.exit_code, answer.stdout, answer.stderr)
            found.append(row)
        return found
    finally:
        box.destroy()
        server.close()


def _keep(contender: Contender, code: int | None, out: str, err: str) -> None:
    if code == 0:
        contender.seconds.append(float(json.loads(out)))
    else:
        contender.failures.append(err.strip()[-200:] or f"exit {code}")
