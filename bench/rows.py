"""The rows of the benchmark: each asks one question of atoll and of what a user would pick instead."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator

from atoll import Sandbox
from atoll.client.blocking import Link
from atoll.client.calls import Call
from bench import peers
from bench.measure import Contender, Row

MIB = 1 << 20
BIG = 256 * MIB


class Bench:
    """One daemon of its own, one live sandbox per runtime, and the rows over them."""

    def __init__(self, home: str, rounds: int, runtimes: list[str]) -> None:
        self.home = home
        self.rounds = rounds
        self.runtimes = runtimes
        self.facts: list[tuple[str, str]] = []
        self._bundles: list[peers.Bundle] = []
        self._live: dict[str, Sandbox] = {}

    def close(self) -> None:
        for box in self._live.values():
            box.destroy()
        for bundle in self._bundles:
            bundle.remove()

    def live(self, runtime: str) -> Sandbox:
        if runtime not in self._live:
            self._live[runtime] = Sandbox(home=self.home, runtime=runtime, network=False, cpus=2, memory_mb=2048)
        return self._live[runtime]

    def rows(self) -> Iterator[Row]:
        yield self.exec_true()
        yield self.snippet()
        yield from self.cold()
        yield self.stdout()
        yield self.upload()
        yield self.download()
        yield self.command_line()

    def exec_true(self) -> Row:
        """Running a program in a live sandbox, against running it on the bare host."""
        contenders = [Contender("bare subprocess.run", peers.bare(["/bin/true"]))]
        for runtime in self.runtimes:
            box = self.live(runtime)
            contenders.append(Contender(f"atoll {runtime}, live sandbox", lambda box=box: box.exec(["/bin/true"])))  # type: ignore[misc]
        return Row("exec of /bin/true", contenders, self.rounds * 10, goal=2.5)

    def snippet(self) -> Row:
        contenders = [Contender("bare python3 -c", peers.bare([peers.HOST_PYTHON, "-c", "print(1)"]))]
        if wrapped := peers.bubblewrap([peers.HOST_PYTHON, "-c", "print(1)"]):
            contenders.append(Contender("bubblewrap", wrapped))
        for runtime in self.runtimes:
            box = self.live(runtime)
            contenders.append(
                Contender(f"atoll {runtime}, live sandbox", lambda box=box: box.run("print(1)", language="python"))  # type: ignore[misc]
            )
        return Row("Python snippet", contenders, self.rounds * 3)

    def cold(self) -> Iterator[Row]:
        """Create and run one command: with nothing prepared (named sandboxes never come from the pool), and from the pool."""
        engines = {"container": ("runc run", peers.runc()), "gvisor": ("runsc run", peers.runsc())}
        for runtime in self.runtimes:
            name, engine = engines[runtime]
            if engine is None:
                continue
            bundle = peers.Bundle(["/bin/true"])
            self._bundles.append(bundle)
            made: list[Sandbox] = []

            def create(cold: bool, runtime: str = runtime, made: list[Sandbox] = made) -> None:
                label = f"bench-{time.monotonic_ns()}" if cold else None
                made.append(Sandbox(home=self.home, runtime=runtime, network=False, name=label))
                made[0].exec(["/bin/true"])

            def destroy(made: list[Sandbox] = made) -> None:
                for box in made:
                    box.destroy()
                made.clear()

            def rested() -> None:
                time.sleep(0.4)  # the pool fills again between rounds; sustained rates are another question

            contenders = [
                Contender(name, bundle.run(engine)),
                Contender(f"atoll {runtime}, cold", lambda create=create: create(True), after=destroy),  # type: ignore[misc]
                Contender(f"atoll {runtime}, from the pool", lambda create=create: create(False), rested, destroy),  # type: ignore[misc]
            ]
            goal = 3.0 if runtime == "container" else 1.3
            yield Row(f"create + first exec, {runtime}", contenders, self.rounds, goal=goal)

    def stdout(self) -> Row:
        box = self.live(self.runtimes[0])
        argv = ["head", "-c", str(BIG), "/dev/zero"]

        def read() -> None:
            total = 0
            for event in box.stream(argv):
                total += len(getattr(event, "data", b""))
            assert total == BIG, total

        def pipe() -> None:
            with subprocess.Popen(argv, stdout=subprocess.PIPE) as process:
                assert process.stdout is not None
                while process.stdout.read(MIB):
                    pass

        contenders = [Contender("bare pipe", pipe), Contender("atoll, stream", read)]
        return Row("stdout, 256 MiB", contenders, max(3, self.rounds // 6), unit_bytes=BIG)

    def upload(self) -> Row:
        box, data = self.live(self.runtimes[0]), os.urandom(BIG)

        def local() -> None:
            with open(f"{self.home}/bench.bin", "wb") as file:
                file.write(data)

        contenders = [
            Contender("bare write", local),
            Contender("atoll, files.write", lambda: box.files.write("/workspace/big", data)),
        ]
        return Row("file upload, 256 MiB", contenders, max(3, self.rounds // 6), unit_bytes=BIG)

    def download(self) -> Row:
        box = self.live(self.runtimes[0])

        def local() -> None:
            with open(f"{self.home}/bench.bin", "rb") as file:
                assert len(file.read()) == BIG

        def fetch() -> None:
            assert len(box.files.read("/workspace/big")) == BIG

        contenders = [Contender("bare read", local), Contender("atoll, files.read", fetch)]
        return Row("file download, 256 MiB", contenders, max(3, self.rounds // 6), unit_bytes=BIG)

    def command_line(self) -> Row:
        env = {**os.environ, "ATOLL_HOME": self.home, "ATOLL_RUNTIME": self.runtimes[0]}
        argv = [sys.executable, "-m", "atoll", "sandbox", "run", "print('hello')", "--lang", "python"]
        contenders = [
            Contender("python3 -c pass", peers.bare([peers.HOST_PYTHON, "-c", "pass"])),
            Contender("atoll sandbox run", lambda: subprocess.run(argv, env=env, check=True, capture_output=True)),
        ]
        return Row("command line, Python hello", contenders, self.rounds, goal=4.0)

    def _pid(self, box: Sandbox) -> int:
        return int(Link(self.home).call(Call("GET", f"/v1/sandboxes/{box.id}"))["pid"])

    def memory(self, count: int = 10) -> None:
        """What an idle sandbox costs: PSS of its processes."""
        for runtime in self.runtimes:
            boxes = [Sandbox(home=self.home, runtime=runtime, network=False) for _ in range(count)]
            try:
                time.sleep(1)
                each = [tree_pss_kb(self._pid(box)) for box in boxes]
                self.facts.append((f"memory per idle sandbox, {runtime} (PSS)", f"{sum(each) / count / 1024:.2f} MB"))
            finally:
                for box in boxes:
                    box.destroy()


def tree_pss_kb(pid: int) -> int:
    """PSS of a process and all its descendants."""
    children: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                with open(f"/proc/{entry}/stat") as file:
                    parent = int(file.read().rpartition(")")[2].split()[1])
            except OSError:
                continue
            children.setdefault(parent, []).append(int(entry))
    total, todo = 0, [pid]
    while todo:
        one = todo.pop()
        todo += children.get(one, [])
        try:
            with open(f"/proc/{one}/smaps_rollup") as file:
                total += sum(int(line.split()[1]) for line in file if line.startswith("Pss:"))
        except OSError:
            continue
    return total
