"""The daemon may die at any moment: no sandbox is lost, no command, no byte that was not yet told, and nothing is left."""

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from lab.daemon import PATIENCE, SOURCE, Box, DaemonProcess, Failed, until

LINES = "for i in $(seq 1 400); do echo line $i; sleep 0.01; done; exit 7"
EXPECTED = "".join(f"line {i}\n" for i in range(1, 401))


def mounts() -> list[str]:
    return [line for line in Path("/proc/self/mountinfo").read_text().splitlines() if "/atl-" in line]


def test_a_killed_daemon_loses_no_command_and_no_output(own_daemon: DaemonProcess) -> None:
    box = own_daemon.create()
    command = box.background(LINES)
    answers: list[object] = []

    def foreground() -> None:
        try:
            answers.append(box.exec("sleep 1; echo late", id="fg-1", timeout_ms=60_000))
        except Exception as error:
            answers.append(error)

    caller = threading.Thread(target=foreground)
    caller.start()
    until(lambda: "fg-1" in [c["command_id"] for c in own_daemon.get(f"{box.path}/commands")["commands"]], "it runs")
    own_daemon.kill()
    caller.join(PATIENCE)
    assert isinstance(answers[0], Exception)
    own_daemon.start()
    assert box.info()["state"] == "running"
    ended = box.ended(command)
    assert (ended["exit_code"], ended["stdout"], ended["truncated"]) == (7, EXPECTED, False)
    # Who asks again with the same id gets the first run's result, not a second run.
    assert box.exec("sleep 1; echo late", id="fg-1", timeout_ms=60_000)["stdout"] == "late\n"
    assert box.exec("echo new")["stdout"] == "new\n"


def test_a_stopped_daemon_cancels_nothing(own_daemon: DaemonProcess) -> None:
    box = own_daemon.create()
    command = box.background(LINES)
    frames = own_daemon.stream(f"{box.path}/exec", {"command": "sleep 2; echo survived", "id": "fg-2", "timeout_ms": 0})
    assert json.loads(next(frames)[1])["started"]
    assert own_daemon.terminate() == 0
    kind, payload = list(frames)[-1]
    assert kind == 5 and json.loads(payload)["code"] == "outcome_unknown"
    assert not (own_daemon.home / "daemon.sock").exists()
    own_daemon.start()
    assert box.ended("fg-2")["stdout"] == "survived\n"
    assert box.ended(command)["stdout"] == EXPECTED


def test_kills_at_random_moments_lose_no_sandbox(own_daemon: DaemonProcess) -> None:
    rounds = int(os.environ.get("ATOLL_KILLS", "3"))
    kept = [own_daemon.create() for _ in range(3)]
    for number, box in enumerate(kept):
        box.write("/workspace/mark", str(number).encode())
    chance = random.Random(1)
    for _ in range(rounds):
        stop = threading.Event()

        def load(stop: threading.Event = stop) -> None:
            while not stop.is_set():
                try:
                    own_daemon.create().destroy()
                    kept[0].exec("echo x")
                except (OSError, Failed, ValueError, Exception):
                    if not stop.wait(0.05):
                        continue

        workers = [threading.Thread(target=load) for _ in range(3)]
        for worker in workers:
            worker.start()
        time.sleep(chance.uniform(0.05, 0.6))
        own_daemon.kill()
        stop.set()
        for worker in workers:
            worker.join(PATIENCE)
        own_daemon.start()
        for number, box in enumerate(kept):
            assert box.read("/workspace/mark") == str(number).encode()
    living = {s["id"] for s in own_daemon.get("/v1/sandboxes")["sandboxes"]}
    assert living >= {box.id for box in kept}
    for sandbox in living - {box.id for box in kept}:  # finished creates whose answer was lost
        Box(own_daemon, sandbox).destroy()
    boxes = own_daemon.home / "boxes"
    until(
        lambda: {n for n in os.listdir(boxes) if len(n) == 20} <= {b.id for b in kept}, "only the kept ones have disks"
    )


def test_an_end_that_came_meanwhile_is_executed_before_serving(own_daemon: DaemonProcess) -> None:
    box = own_daemon.create(lifetime_s=3)
    dead = own_daemon.create()
    pid = dead.info()["pid"]
    own_daemon.kill()
    os.kill(pid, signal.SIGKILL)
    deadline = time.time() + 3.5
    until(lambda: time.time() > deadline, "the lifetime is over")
    own_daemon.start()
    assert (box.info()["state"], box.info()["end"]["kind"]) == ("ended", "expired")
    assert dead.info()["state"] == "ended" and dead.info()["end"]["kind"] in ("lost", "crashed")


def test_paused_and_stopped_ones_are_found_again(own_daemon: DaemonProcess) -> None:
    paused, stopped = own_daemon.create(), own_daemon.create()
    stopped.write("/workspace/x", b"kept")
    own_daemon.post(f"{paused.path}/pause")
    own_daemon.post(f"{stopped.path}/stop")
    own_daemon.kill()
    own_daemon.start()
    assert (paused.info()["state"], stopped.info()["state"]) == ("paused", "stopped")
    own_daemon.post(f"{paused.path}/resume")
    assert paused.exec("echo back")["stdout"] == "back\n"
    own_daemon.post(f"{stopped.path}/start")
    assert stopped.read("/workspace/x") == b"kept"


def test_only_one_daemon_per_home(own_daemon: DaemonProcess) -> None:
    argv = [sys.executable, "-m", "atoll.server.daemon", "--home", str(own_daemon.home)]
    second = subprocess.run(argv, env={**os.environ, "PYTHONPATH": str(SOURCE)}, capture_output=True, timeout=PATIENCE)
    assert second.returncode == 75 and b"another daemon" in second.stderr
    assert own_daemon.get("/v1/health")["ok"]


def test_a_forced_stop_ends_everything(own_daemon: DaemonProcess) -> None:
    for _ in range(3):
        own_daemon.create()
    own_daemon.post("/v1/daemon/stop", {"force": True})
    assert own_daemon.process is not None
    assert own_daemon.process.wait(PATIENCE) == 0
    left = [p.name for p in (own_daemon.home / "boxes").iterdir() if len(p.name) == 20]
    assert left == [] and not [line for line in mounts() if str(own_daemon.home) in line]


def test_an_idle_daemon_leaves() -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root")
    daemon = DaemonProcess("[daemon]\nidle_exit_s = 3\n")
    daemon.start()
    assert daemon.process is not None
    assert daemon.process.wait(PATIENCE) == 0
    assert not (daemon.home / "daemon.sock").exists()
    daemon.start()
    daemon.post("/v1/daemon/pin")
    box = daemon.create()
    box.destroy()
    assert daemon.get("/v1/health")["ok"]
    daemon.close()


@pytest.mark.parametrize("text", ["[limts]\nx = 1\n", "[limits]\nmemory_mb = 'much'\n", "not toml"])
def test_bad_settings_are_refused_with_the_reason(text: str) -> None:
    daemon = DaemonProcess(text)
    with pytest.raises(AssertionError):
        daemon.start()
    said = (daemon.home / "stderr").read_text()
    assert "invalid_argument" in said and "config.toml" in said and "Traceback" not in said
    import shutil

    shutil.rmtree(daemon.home)
