"""A claimed sandbox is the one a cold start would have made, is used once, and nothing of the pool is left behind."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from atoll import Sandbox

WAIT = 120.0


class PoolDaemon:
    def __init__(self, home: str) -> None:
        self.home = home
        self.env = {k: v for k, v in os.environ.items() if not k.startswith(("ATOLL_", "K8E_"))}
        self.env["ATOLL_HOME"] = home

    def atoll(self, *words: str) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "atoll", *words], env=self.env, capture_output=True, text=True, timeout=WAIT
        )
        assert done.returncode == 0, done
        return done.stdout

    def pool(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.atoll("daemon", "status", "--json"))["pool"]
        return found

    def ready(self) -> None:
        self.until(lambda: (pool := self.pool())["ready"] >= sum(k["wanted"] for k in pool["kinds"]) > 0)

    def until(self, condition: Callable[[], object]) -> None:
        deadline = time.monotonic() + WAIT
        while not condition():
            assert time.monotonic() < deadline, self.pool()
            time.sleep(0.05)


@pytest.fixture(scope="module")
def daemon() -> Iterator[PoolDaemon]:
    made = PoolDaemon(tempfile.mkdtemp(prefix="atp-"))
    (Path(made.home) / "config.toml").write_text('[sandboxes]\nruntime = "container"\n[pool]\nfloor = 1\nceiling = 2\n')
    try:
        made.atoll("daemon", "prewarm")
        yield made
    finally:
        subprocess.run([sys.executable, "-m", "atoll", "daemon", "stop", "--force"], env=made.env, timeout=WAIT)
        shutil.rmtree(made.home, ignore_errors=True)


def facts(box: Sandbox) -> dict[str, Any]:
    """What code inside can see of its surroundings, without what is random by nature."""
    code = """
import json, os, resource
env = dict(os.environ)
print(json.dumps({
    "env": env, "cwd": os.getcwd(), "uid": os.getuid(), "files": sorted(os.listdir("/workspace")),
    "tmp": sorted(n for n in os.listdir("/tmp") if not n.startswith("_k8e_run")),
    "nofile": resource.getrlimit(resource.RLIMIT_NOFILE), "core": resource.getrlimit(resource.RLIMIT_CORE),
    "nics": sorted(os.listdir("/sys/class/net")), "host": os.uname().nodename.startswith("sandbox-"),
    "resolv": open("/etc/resolv.conf").read(),
    "caps": [l for l in open("/proc/self/status") if l.startswith(("Cap", "NoNew", "Seccomp"))],
}))
"""
    answer = box.run(code, language="python")
    assert answer.exit_code == 0, answer.stderr
    found: dict[str, Any] = json.loads(answer.stdout)
    return found


def test_k8e_D37_a_claimed_sandbox_equals_a_cold_one(daemon: PoolDaemon) -> None:
    """The same request, once from the pool and once cold (a mount rules the pool out), shows the same surroundings."""
    options: dict[str, Any] = {
        "env": {"MINE": "1"},
        "memory_mb": 256,
        "pids": 99,
        "cpus": 0.5,
        "hosts": ["example.com"],
    }
    Sandbox.create(home=daemon.home, **options).destroy()  # now spares of this size are kept too
    daemon.ready()
    hits = daemon.pool()["hits"]
    with Sandbox(home=daemon.home, **options) as warm:
        seen, info = facts(warm), warm.info()
        assert daemon.pool()["hits"] == hits + 1
    with tempfile.TemporaryDirectory(prefix="atp-m-") as source:
        mounts = [{"source": source, "target": "/mnt/x", "read_only": True}]
        with Sandbox(home=daemon.home, mounts=mounts, **options) as cold:
            other, again = facts(cold), cold.info()
            assert daemon.pool()["hits"] == hits + 1
    assert seen == other
    assert seen["env"]["MINE"] == "1" and "eth0" in seen["nics"]
    assert info.limits == again.limits


def test_k8e_P30_from_a_claim_to_the_first_result(daemon: PoolDaemon) -> None:
    """Half a second is what bench/ measures; here ten times that, for the best of a few on a busy machine."""
    best, deadline = WAIT, time.monotonic() + WAIT
    while best > 5.0:
        assert time.monotonic() < deadline, f"the best claim took {best:.1f} s"
        daemon.ready()
        hits, started = daemon.pool()["hits"], time.monotonic()
        with Sandbox(home=daemon.home) as warm:
            assert warm.run("echo 1", language="bash").stdout == "1\n"
            best = min(best, time.monotonic() - started)
        assert daemon.pool()["hits"] == hits + 1


def test_no_network_stays_none(daemon: PoolDaemon) -> None:
    daemon.ready()
    hits = daemon.pool()["hits"]
    with Sandbox(home=daemon.home, network=False) as box:
        assert facts(box)["nics"] == ["lo"]
    assert daemon.pool()["hits"] == hits + 1


def test_limits_of_the_claimer_hold(daemon: PoolDaemon) -> None:
    daemon.ready()
    with Sandbox(home=daemon.home, network=False, memory_mb=64) as box:
        hog = box.exec(["python3", "-c", "b = bytearray(300 << 20); print(len(b))"], timeout=100)
        assert hog.exit_code != 0
        assert b"314572800" not in hog.stdout.encode()


def test_LIF_01_nothing_of_one_caller_reaches_the_next(daemon: PoolDaemon) -> None:
    """A marker in every writable place and a process left behind: no later claim sees them, and no id comes twice."""
    seen: set[str] = set()
    for _ in range(4):
        daemon.ready()
        with Sandbox(home=daemon.home, network=False, env={"LEFT": "behind"}) as box:
            found = box.exec(
                "ls /workspace /tmp /dev/shm /root /var/tmp /usr/local/marker 2>/dev/null; cat /etc/marker; true"
            )
            assert "marker" not in found.stdout, found.stdout
            assert "nohup" not in str([p.cmdline for p in box.processes()])
            box.exec(
                "for d in /workspace /tmp /dev/shm /root /var/tmp /etc /usr/local; do echo x > $d/marker; done; "
                "nohup sleep 100000 >/dev/null 2>&1 & true"
            )
            assert box.id not in seen
            seen.add(box.id)


def test_what_a_started_sandbox_cannot_take_on_is_made_cold(daemon: PoolDaemon) -> None:
    daemon.ready()
    before = daemon.pool()
    name = "pool-named"
    with Sandbox(home=daemon.home, network=False, name=name) as box:
        assert box.exec(["hostname"]).stdout == name + "\n"
    assert daemon.pool()["hits"] == before["hits"]


def test_a_killed_daemon_leaves_no_spare(daemon: PoolDaemon) -> None:
    """Spares have no record; the next daemon's sweep removes them, and makes its own."""
    daemon.ready()
    boxes = Path(daemon.home) / "boxes"
    left = set(os.listdir(boxes))
    assert left
    os.kill(json.loads(daemon.atoll("daemon", "status", "--json"))["pid"], 9)
    daemon.atoll("daemon", "prewarm")
    daemon.until(lambda: not left & set(os.listdir(boxes)))


def test_ak_P27_the_pool_has_the_bounds_the_operator_set(daemon: PoolDaemon) -> None:
    """`[pool]` of config.toml: the status shows what is in force, and so many there are."""
    daemon.ready()
    pool = daemon.pool()
    assert (pool["floor"], pool["ceiling"]) == (1, 2)
    assert all(1 <= kind["wanted"] <= 2 for kind in pool["kinds"])
    assert "  of each kind: 1 to 2\n" in daemon.atoll("daemon", "status")


def test_sandboxes_of_a_mode_are_kept_warm_when_asked_for(daemon: PoolDaemon) -> None:
    """A mode has a system call filter of its own, so the spares of the default kind do not serve it."""
    daemon.atoll("daemon", "prewarm", "--mode", "claude", "--count", "2")
    before = daemon.pool()
    assert max(kind["wanted"] for kind in before["kinds"]) == 2
    assert len(before["kinds"]) >= 2 and all(kind["ready"] for kind in before["kinds"])
    with Sandbox(home=daemon.home, mode="claude") as box:
        assert box.exec(["/bin/true"]).exit_code == 0
    assert daemon.pool()["hits"] == before["hits"] + 1
    done = subprocess.run(
        [sys.executable, "-m", "atoll", "daemon", "prewarm", "--mode", "cloud"],
        env=daemon.env, capture_output=True, text=True, timeout=WAIT,
    )  # fmt: skip
    assert done.returncode != 0 and "unknown compatibility mode" in done.stderr + done.stdout


def test_ak_K16_stopping_the_daemon_gives_its_spares_up(daemon: PoolDaemon) -> None:
    daemon.atoll("daemon", "prewarm")
    daemon.atoll("daemon", "stop")
    assert os.listdir(Path(daemon.home) / "boxes") == []
    daemon.atoll("daemon", "prewarm")


def test_ak_K4_P26_a_run_of_its_own_is_served_by_a_spare_and_shares_nothing(daemon: PoolDaemon) -> None:
    """What one run leaves in files, variables and processes the next does not see, though both were warm."""
    code = (
        "import os, pathlib, subprocess; seen = sorted(os.listdir('/tmp') + os.listdir('/workspace')); "
        "pathlib.Path('/tmp/left').touch(); pathlib.Path('/workspace/left').touch(); "
        "subprocess.Popen(['sleep', '600'], stdout=-3, stderr=-3); print(seen, os.environ.get('LEFT'))"
    )
    daemon.atoll("daemon", "prewarm")
    for number in range(3):
        daemon.ready()
        hits = daemon.pool()["hits"]
        extra = ("--env", "LEFT=1") if number == 0 else ()
        found = daemon.atoll("run", *extra, "python3", "-c", code)
        assert found == f"[] {'1' if number == 0 else None}\n"
        assert daemon.pool()["hits"] == hits + 1


def test_everyday_11_the_status_counts_warm_sandboxes_of_each_agent(daemon: PoolDaemon) -> None:
    daemon.atoll("daemon", "prewarm", "--mode", "codex")
    daemon.ready()
    agents = daemon.pool()["agents"]
    assert list(agents) == ["native", "claude", "codex", "gemini"] and agents["codex"] >= 1
    assert f"  for codex: {agents['codex']} warm\n" in daemon.atoll("daemon", "status")
