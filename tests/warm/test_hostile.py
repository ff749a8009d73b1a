"""A program that takes the warm interpreter over, from its first line on, or stops it: runs still end, when and how they should."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from lab.sandboxes import NO_SPARES, PATIENCE, Lab, until
from lab.warmth import cold, counts, heat, warm

from atoll import ExecResult, Sandbox

# Read by every interpreter that starts; in the one that is to make spares it answers the agent in its place.
TAKEN_OVER = """
import os, signal, socket, struct, sys
words = open("/proc/self/cmdline", "rb").read().split(b"\\0")
if len(words) > 2 and words[2].startswith(b"exec(__import__"):
    os.read(0, 1 << 17)
    control = socket.socket(fileno=os.dup(0))
    control.send(b"r")

    def report(channel, kind, first, second):
        channel.send(struct.pack("=5Q", kind, first, second, 0, 0))

    kept = []
    while True:
        data, fds, _, _ = socket.recv_fds(control, 1, 3)
        if not data:
            os._exit(0)
        channel = socket.socket(fileno=fds[0])
        kept += [fds, channel]
        ATTACK
"""
# A child of the agent with a child of its own: all that can be seen from outside is right.
SILENT = """
        if os.fork() == 0:
            if os.fork() == 0:
                below = os.fork()
                if below == 0:
                    signal.pause()
                report(channel, 5, below, os.getpid())
                signal.pause()
            os._exit(0)
        os.wait()
"""
FLOOD = SILENT.replace(
    "                signal.pause()\n            os._exit",
    "                os.read(fds[1], 1)\n"
    "                while True:\n                    report(channel, 1, below, 0)\n            os._exit",
)


def ended(box: Sandbox, code: str, **options: Any) -> ExecResult:
    """The run, which has to be over some time."""
    pool = ThreadPoolExecutor(1)
    try:
        return pool.submit(box.exec, ["python3", "-c", code], **options).result(PATIENCE)
    finally:
        pool.shutdown(wait=False)


def take_over(lab: Lab, box: Sandbox, attack: str) -> None:
    place = box.exec(["python3", "-c", "import site; print(site.getsitepackages()[0])"], user="root").stdout.strip()
    box.files.write(f"{place}/taken_over.py", TAKEN_OVER.replace("ATTACK", attack.strip()))
    box.files.write(f"{place}/taken_over.pth", "import taken_over\n")
    box.run("pass")
    until(lambda: counts(lab, box)["ready"], "the agent believes that a spare is there")


@pytest.mark.parametrize("pids", [("99999", "99998"), ("1", "1"), ("os.getpid()", "os.getpid()")])
def test_a_spare_that_is_none_is_not_taken(lab: Lab, pids: tuple[str, str]) -> None:
    with lab.sandbox(runtime="container") as box:
        take_over(lab, box, "report(channel, 5, {}, {})".format(*pids))
        assert ended(box, "print('cold')", timeout=PATIENCE / 2).stdout == "cold\n"
        assert counts(lab, box)["hits"] == 0


@pytest.mark.parametrize("attack", [SILENT, FLOOD], ids=["silent", "flood"])
def test_a_false_spare_cannot_outlast_a_timeout(lab: Lab, runtime: str, attack: str) -> None:
    with lab.sandbox(runtime=runtime) as box:
        take_over(lab, box, attack)
        result = ended(box, "print('never')", timeout=2)
        assert (result.timed_out, result.stdout) == (True, "")
        assert box.exec("echo here").stdout == "here\n"


def test_a_stopped_spare_costs_a_cold_start(lab: Lab, runtime: str) -> None:
    with lab.sandbox(runtime=runtime) as box:
        heat(lab, box)
        before = counts(lab, box)["hits"]
        box.exec("for p in /proc/[0-9]*; do grep -qx python3 $p/comm && kill -STOP ${p#/proc/}; done")
        assert ended(box, "print('cold')").stdout == "cold\n"
        assert counts(lab, box)["hits"] == before


PLANTED = ("_ctypes", "_socket", "gc", "io", "site", "posix", "fractions", "colorsys")


@pytest.mark.parametrize("preload", ["", '[warm]\npreload = ["fractions", "colorsys"]\n'], ids=["plain", "preload"])
def test_what_lies_in_the_workspace_is_not_run_unasked(preload: str) -> None:
    """A sub-agent or a project puts modules there whose names the waiting interpreter imports; no program has asked for them."""
    lab = Lab(NO_SPARES + preload)
    try:
        with lab.sandbox(runtime="container") as box:
            for name in PLANTED:
                box.files.write(f"/workspace/{name}.py", f"open('/tmp/ran-{name}', 'w').close()\n")
            assert warm(lab, box, ["python3", "-c", "print('own')"]).stdout == "own\n"
            assert [entry.name for entry in box.files.list("/tmp") if entry.name.startswith("ran-")] == []
            paths = "import sys; print(sys.path)"
            assert (
                warm(lab, box, ["python3", "-c", paths]).stdout == cold(box, ["python3", "-c", paths]).stdout
            )  # and it is on the path as ever
    finally:
        lab.close()
