"""Bytes out of and into a sandbox, against the same on the bare host."""

import os
import subprocess
from functools import partial

from bench.lab import Lab
from bench.measure import Contender

MIB = 1 << 20
BIG = 128 * MIB
PLACE = "/workspace/bench.bin"


def stdout(lab: Lab) -> list[Contender]:
    argv = ["head", "-c", str(BIG), "/dev/zero"]

    def pipe() -> None:
        with subprocess.Popen(argv, stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            while process.stdout.read(MIB):
                pass

    def read(runtime: str) -> None:
        total = sum(len(getattr(event, "data", b"")) for event in lab.live(runtime).stream(argv))
        assert total == BIG, total

    ours = [Contender(f"atoll {r}", partial(read, r)) for r in lab.runtimes]
    return [Contender("bare pipe", pipe), *ours]


def upload(lab: Lab) -> list[Contender]:
    data = os.urandom(BIG)

    def local() -> None:
        with open(lab.work / "bench.bin", "wb") as file:
            file.write(data)

    ours = [Contender(f"atoll {r}", partial(_put, lab, r, data)) for r in lab.runtimes]
    return [Contender("bare write", local), *ours]


def download(lab: Lab) -> list[Contender]:
    data = os.urandom(BIG)
    (lab.work / "bench.bin").write_bytes(data)
    for runtime in lab.runtimes:
        _put(lab, runtime, data)

    def local() -> None:
        with open(lab.work / "bench.bin", "rb") as file:
            assert len(file.read()) == BIG

    def fetch(runtime: str) -> None:
        assert len(lab.live(runtime).files.read(PLACE)) == BIG

    ours = [Contender(f"atoll {r}", partial(fetch, r)) for r in lab.runtimes]
    return [Contender("bare read", local), *ours]


def _put(lab: Lab, runtime: str, data: bytes) -> None:
    lab.live(runtime).files.write(PLACE, data)
