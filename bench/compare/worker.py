"""One revision at work: a daemon of its own, and rows that are asked for one sample at a time.

It is run by the interpreter of the revision it measures, so it uses nothing but the public face: the SDK's names in `atoll`,
the command line, and HTTP on the daemon's socket. Requests and answers are lines of JSON on stdin and stdout.
"""

import http.client
import importlib
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Generator
from contextlib import suppress
from pathlib import Path
from typing import Any

READY, POOL_FULL = 120.0, 20.0
MIB = 1 << 20
PLACE = "/workspace/compared.bin"
CLIENT = """
import socket, sys, time
host, port, size, count = socket.gethostbyname(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
def get():
    start = time.perf_counter()
    with socket.create_connection((host, port)) as s:
        s.sendall(b"%d\\n" % size)
        got = 0
        while got < size:
            data = s.recv(1 << 20)
            if not data:
                raise SystemExit("cut short")
            got += len(data)
    return time.perf_counter() - start
get()
print(sorted(get() for _ in range(count))[count // 2])
"""
Sample = Callable[[], float]
Steps = Generator[Sample, None, None]


class Side:
    """The daemon of this revision, and what several rows use."""

    def __init__(self, tree: Path, home: Path, runtime: str) -> None:
        self.home = home
        self.runtime = runtime
        self.atoll = [sys.executable, str(tree / "scripts" / "atoll")]
        home.mkdir(mode=0o711)
        with open(home / "serve.log", "wb") as log:
            self._daemon = subprocess.Popen(
                [*self.atoll, "serve", "--grpc", "127.0.0.1:0"],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip
        until = time.monotonic() + READY
        while not (home / "daemon.sock").exists() or not (home / "grpc.endpoint").exists():
            if self._daemon.poll() is not None or time.monotonic() > until:
                raise RuntimeError("the daemon did not start: " + (home / "serve.log").read_text()[-500:])
            time.sleep(0.05)
        self._ask("POST", "/v1/daemon/pin")  # from now on there is a pool
        from atoll import Sandbox

        self.make = Sandbox.create
        self.box = Sandbox.create(runtime=runtime, network=False, cpus=2, memory_mb=1024)

    def health(self) -> Any:
        return self._ask("GET", "/v1/health")

    def _ask(self, method: str, path: str) -> Any:
        connection = http.client.HTTPConnection("daemon", timeout=60)
        connection.sock = socket.socket(socket.AF_UNIX)
        connection.sock.connect(str(self.home / "daemon.sock"))
        try:
            connection.request(method, path, "{}" if method == "POST" else None)
            return json.loads(connection.getresponse().read())
        finally:
            connection.close()

    def wait_for_pool(self) -> None:
        until = time.monotonic() + POOL_FULL
        while time.monotonic() < until:
            if all(kind["ready"] >= kind["wanted"] for kind in self.health()["pool"]["kinds"]):
                return
            time.sleep(0.05)

    def command(self, *words: str) -> None:
        env = {**os.environ, "ATOLL_RUNTIME": self.runtime, "ATOLL_TENANT": "compared"}
        subprocess.run([*self.atoll, *words], env=env, cwd="/", check=True, capture_output=True, timeout=300)

    def close(self) -> None:
        stop = [*self.atoll, "daemon", "stop", "--force"]
        with suppress(subprocess.TimeoutExpired):
            subprocess.run(stop, capture_output=True, timeout=300)
            self._daemon.wait(60)
        if self._daemon.poll() is None:
            self._daemon.kill()
            self._daemon.wait()


def timed(work: Callable[[], object], times: int = 1) -> float:
    """The median of so many calls, in seconds."""
    found = []
    for _ in range(times):
        start = time.perf_counter()
        work()
        found.append(time.perf_counter() - start)
    return statistics.median(found)


def good(answer: Any) -> Any:
    if answer.exit_code != 0:
        raise RuntimeError(f"exit {answer.exit_code}: {answer.stderr[-200:]}")
    return answer


# Rows. Each prepares itself, yields what takes one sample, and cleans up when it is closed.


def exec_true(side: Side) -> Steps:
    yield lambda: timed(lambda: good(side.box.exec(["/bin/true"])), 20)


def snippet_python(side: Side) -> Steps:
    yield lambda: timed(lambda: good(side.box.run("print(1)", "python")), 8)


def create(side: Side) -> Steps:
    """A cold create, which a name asks for, and its first command."""

    def sample() -> float:
        made: list[Any] = []

        def work() -> None:
            made.append(side.make(runtime=side.runtime, network=False, name=f"cold-{time.monotonic_ns()}"))
            good(made[0].exec(["/bin/true"]))

        seconds = timed(work)
        made[0].destroy()
        side.wait_for_pool()
        return seconds

    yield sample


def claim(side: Side) -> Steps:
    """A create that the pool serves, and its first command."""

    def sample() -> float:
        side.wait_for_pool()
        if not side.health()["pool"]["ready"]:
            raise RuntimeError("the pool is empty, so this would time a cold create")
        made: list[Any] = []

        def work() -> None:
            made.append(side.make(runtime=side.runtime))
            good(made[0].exec(["/bin/true"]))

        seconds = timed(work)
        made[0].destroy()
        return seconds

    yield sample
    side.wait_for_pool()


def destroy(side: Side) -> Steps:
    def sample() -> float:
        made = side.make(runtime=side.runtime, network=False, name=f"end-{time.monotonic_ns()}")
        good(made.exec(["/bin/true"]))
        seconds = timed(made.destroy)
        side.wait_for_pool()
        return seconds

    yield sample


def cli_version(side: Side) -> Steps:
    yield lambda: timed(lambda: side.command("--version"), 2)


def cli_run(side: Side) -> Steps:
    yield lambda: timed(lambda: side.command("sandbox", "run", "print(1)", "--lang", "python"))


def stdout(side: Side) -> Steps:
    argv = ["head", "-c", str(32 * MIB), "/dev/zero"]

    def read() -> None:
        total = sum(len(getattr(event, "data", b"")) for event in side.box.stream(argv))
        if total != 32 * MIB:
            raise RuntimeError(f"{total} bytes came")

    yield lambda: timed(read)


def upload(side: Side) -> Steps:
    data = os.urandom(32 * MIB)
    yield lambda: timed(lambda: side.box.files.write(PLACE, data))


def download(side: Side) -> Steps:
    side.box.files.write(PLACE, os.urandom(32 * MIB))
    yield lambda: timed(lambda: side.box.files.read(PLACE))


def _broker(side: Side, size: int, count: int) -> Steps:
    server = socket.create_server(("127.0.0.1", 0), backlog=64)
    port = server.getsockname()[1]
    threading.Thread(target=_serve, args=(server,), daemon=True).start()
    box = side.make(runtime=side.runtime, hosts=[], host_ports=[port], cpus=2, memory_mb=1024)
    argv = ["python3", "-c", CLIENT, "host.atoll.internal", str(port), str(size), str(count)]
    try:
        yield lambda: float(good(box.exec(argv, timeout=120)).stdout)
    finally:
        box.destroy()
        server.close()


def _serve(server: socket.socket) -> None:
    while True:
        try:
            connection, _ = server.accept()
        except OSError:
            return
        with connection, suppress(OSError, ValueError):
            left = int(connection.makefile("rb").readline())
            while left > 0:
                left -= connection.send(bytes(min(left, MIB)))


def broker_first_byte(side: Side) -> Steps:
    yield from _broker(side, 1, 25)


def broker_throughput(side: Side) -> Steps:
    yield from _broker(side, 64 * MIB, 1)


def grpc_exec(side: Side) -> Steps:
    from atoll import SandboxClient

    client = SandboxClient((side.home / "grpc.endpoint").read_text().split()[0])
    session = client.create_session(side.runtime, [])
    try:
        yield lambda: timed(lambda: good(client.exec(session, "/bin/true")), 20)
    finally:
        client.destroy_session(session)
        client.close()


def snapshot(side: Side) -> Steps:
    """The save of 32 MiB that are new each time."""
    from atoll import Sandbox

    box = side.make(runtime=side.runtime, network=False, disk_mb=1024)
    try:

        def sample() -> float:
            good(box.exec(["sh", "-c", f"head -c {32 * MIB} /dev/urandom > /workspace/new"]))
            name = f"compared-{time.monotonic_ns()}"
            seconds = timed(lambda: box.snapshot(name))
            Sandbox.delete_snapshot(name)
            return seconds

        yield sample
    finally:
        box.destroy()


ROWS: dict[str, Callable[[Side], Steps]] = {
    row.__name__.replace("_", "-"): row
    for row in (
        exec_true, snippet_python, grpc_exec, create, claim, destroy, cli_version, cli_run, stdout, upload, download,
        broker_first_byte, broker_throughput, snapshot,
    )
}  # fmt: skip


def count(side: Side, tracing: Any) -> dict[str, float]:
    """Count what tests/perf_guard counts, with its counters: system calls, programs and processes, the same on a slow machine."""
    daemon, rounds, starts = int(side.health()["pid"]), 20, f"trace={tracing.STARTING}"
    for _ in range(5):
        side.box.exec(["/bin/true"])
    with tracing.attached(daemon) as exec_calls:
        for _ in range(rounds):
            side.box.exec(["/bin/true"])
    working = exec_calls.working()
    found = {
        "exec, system calls of the daemon": sum(working.values()) / rounds,
        "exec, writes of the daemon": working.get("write", 0) / rounds,
        "exec, processes of the daemon": exec_calls.processes(),
    }
    side.make(runtime=side.runtime, network=False, name="counted-first").destroy()
    side.wait_for_pool()
    with tracing.attached(daemon, "-e", starts) as create_calls:
        made = side.make(runtime=side.runtime, network=False, name="counted")
    made.destroy()
    found["cold create, programs"] = len(create_calls.programs())
    found["cold create, processes"] = create_calls.processes()
    argv = [*side.atoll, "sandbox", "run", "echo hi", "--lang", "bash", "--session-id", side.box.id]
    calls = tracing.run(argv, dict(os.environ), "-e", f"{starts},socket,connect")
    found["command line, programs"] = len(calls.programs())
    found["command line, connections"] = len(calls.of("connect"))
    return found


def main() -> None:
    tree, home, runtime, counters = sys.argv[1:]
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what is printed by accident is no answer
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the one who asks says when it is over
    os.environ["ATOLL_HOME"] = home
    side = Side(Path(tree), Path(home), runtime)
    steps: Steps | None = None
    sample: Sample | None = None
    try:
        answers.write(json.dumps({"ok": True}) + "\n")
        for line in sys.stdin:
            asked = json.loads(line)
            answer: dict[str, Any] = {"ok": True}
            try:
                if asked["do"] == "begin":
                    steps = ROWS[asked["row"]](side)
                    sample = next(steps)
                elif asked["do"] == "sample" and sample is not None:
                    answer["seconds"] = sample()
                elif asked["do"] == "end" and steps is not None:
                    for _ in steps:
                        pass
                elif asked["do"] == "count":
                    sys.path.insert(0, counters)
                    answer["counts"] = count(side, importlib.import_module("tracing"))
            except Exception as error:
                answer = {"failed": f"{type(error).__name__}: {error}"[:300]}
            answers.write(json.dumps(answer) + "\n")
    finally:
        side.close()


if __name__ == "__main__":
    main()
