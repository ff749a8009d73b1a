"""A gVisor sandbox in which nothing runs is frozen, and nobody can tell that it slept."""

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from lab.daemon import Box, DaemonProcess, running_daemon, until

CONFIG = '[sandboxes]\nruntime = "gvisor"\ndoze_after_s = 0.2\n[pool]\nfloor = 0\nceiling = 0\n'


@pytest.fixture
def sleepy() -> Iterator[DaemonProcess]:
    with running_daemon(CONFIG) as made:
        yield made


def frozen(box: Box) -> bool:
    top = Path("/sys/fs/cgroup")
    files = [file for root in (top, top / "unified") for file in root.glob(f"atoll/*/{box.id}/cgroup.events")]
    assert files
    return any("frozen 1" in file.read_text() for file in files)


def test_an_unused_sandbox_sleeps_and_wakes_for_whatever_is_asked(sleepy: DaemonProcess) -> None:
    box = sleepy.create(network=False)
    until(lambda: frozen(box), "it sleeps")
    assert box.info()["state"] == "running"
    assert box.exec("echo awake")["stdout"] == "awake\n"
    until(lambda: frozen(box), "it sleeps again")
    box.write("/workspace/a", b"written")
    until(lambda: frozen(box), "and again")
    assert box.read("/workspace/a") == b"written"
    assert box.run("print(6 * 7)")["stdout"] == "42\n"
    until(lambda: frozen(box), "also beside a warm interpreter")
    assert box.run("print(6 * 7)")["stdout"] == "42\n"
    until(lambda: frozen(box), "before its end")
    assert box.destroy()["state"] == "ended"


def test_twenty_who_ask_a_sleeping_sandbox_at_once_are_all_served(sleepy: DaemonProcess) -> None:
    box = sleepy.create(network=False)
    until(lambda: frozen(box), "it sleeps")
    with ThreadPoolExecutor(20) as callers:
        answers = list(callers.map(lambda n: box.exec(f"echo {n}")["stdout"], range(20)))
    assert answers == [f"{n}\n" for n in range(20)]


def test_a_sandbox_with_a_program_in_it_stays_awake(sleepy: DaemonProcess) -> None:
    """Also one that no command waits for. What sleeps beside it shows that it was looked at."""
    busy = sleepy.create(network=False)
    busy.exec(
        "setsid sleep 3600 >/dev/null 2>&1 </dev/null & while sleep 0.1; do date +%s%N > /workspace/now; done & exit 0"
    )
    until(lambda: busy.exec("cat /workspace/now")["exit_code"] == 0, "it has begun")
    other = sleepy.create(network=False)
    until(lambda: frozen(other), "the other sleeps")
    assert not frozen(busy)
    before = busy.read("/workspace/now")
    until(lambda: busy.read("/workspace/now") != before, "it goes on")


def test_a_daemon_that_dies_leaves_nobody_asleep_for_good(sleepy: DaemonProcess) -> None:
    box = sleepy.create(network=False)
    box.write("/workspace/a", b"kept")
    until(lambda: frozen(box), "it sleeps")
    sleepy.kill()
    assert frozen(box)
    sleepy.start()
    assert box.read("/workspace/a") == b"kept" and box.exec("echo on")["stdout"] == "on\n"
    until(lambda: frozen(box), "it sleeps again")


def test_everyday_31_a_daemon_that_stops_leaves_idle_sandboxes_frozen_and_the_next_use_thaws_them() -> None:
    """Also those that were awake a moment ago, but none in which a program runs."""
    with running_daemon(CONFIG.replace("0.2", "600")) as daemon:
        idle, busy = daemon.create(network=False), daemon.create(network=False)
        idle.write("/workspace/a", b"kept")
        busy.exec("while sleep 0.1; do date +%s%N > /workspace/now; done >/dev/null 2>&1 & exit 0")
        until(lambda: busy.exec("cat /workspace/now")["exit_code"] == 0, "it has begun")
        assert not frozen(idle)
        daemon.terminate()
        assert frozen(idle) and not frozen(busy)
        daemon.start()
        assert idle.read("/workspace/a") == b"kept" and idle.exec("echo on")["stdout"] == "on\n"
        before = busy.read("/workspace/now")
        until(lambda: busy.read("/workspace/now") != before, "it goes on")
        daemon.terminate()
        daemon.start()
        assert idle.destroy()["state"] == "ended"


def test_everyday_31_a_sandbox_left_frozen_ends_at_its_lifetime_when_the_next_daemon_comes() -> None:
    with running_daemon(CONFIG.replace("0.2", "600")) as daemon:
        box = daemon.create(network=False, lifetime_s=10)  # the daemon has left by then, on a slow machine too
        end = box.info()["expires_at"]
        daemon.terminate()
        assert frozen(box)
        time.sleep(max(0.0, end - time.time()) + 0.2)
        daemon.start()
        assert box.info()["state"] == "ended" and box.info()["end"]["kind"] == "expired"
