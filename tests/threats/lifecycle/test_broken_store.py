"""F2-H5: a store that cannot be used keeps no sandbox from ending, and what was not recorded is recorded later."""

import os
import secrets
import shutil
import sqlite3
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from lab.daemon import PATIENCE, SOURCE, DaemonProcess, until
from lab.plain_backend import plain_core
from lab.sandboxes import RUNTIMES

from atoll.core import Core
from atoll.core.access.principals import local
from atoll.core.store.database import StoreFailed
from atoll.model import CreateSandbox

ME = local(os.geteuid(), os.getegid())


class Broken:
    """A connection of which every use fails, as that of a damaged file does."""

    in_transaction = False

    def execute(self, *_: Any) -> None:
        raise StoreFailed(sqlite3.DatabaseError("database disk image is malformed"))


async def test_destroy_stop_and_deadlines_work_without_the_store() -> None:
    async with plain_core() as core:
        made = [await core.sandboxes.create(ME, CreateSandbox(name=f"box{n}")) for n in range(3)]
        boxes = [core.sandboxes.live[ME.owner, one.id].box for one in made]
        database = core.store._db
        real, database.connection = database.connection, Broken()  # type: ignore[attr-defined]
        try:
            ended = await core.sandboxes.destroy(ME, "box0")
            assert ended.state == "ended" and "store" in (ended.unrecorded or [])
            stopped = await core.sandboxes.stop(ME, made[1].id)
            assert stopped.state == "stopped" and "store" in (stopped.unrecorded or [])
            core.sandboxes.live[ME.owner, made[2].id].expires_at = 1.0
            await core.reaper.reap()
            assert not core.sandboxes.live, "nothing runs any more"
            for box in boxes:
                await box.wait()
            with pytest.raises(StoreFailed):
                await core.sandboxes.create(ME, CreateSandbox())
        finally:
            database.connection = real  # type: ignore[attr-defined]
        await core.reaper.reap()
        assert await _states(core, made) == ["ended", "stopped", "ended"]
        assert (await core.sandboxes.get(ME, made[2].id)).end.kind == "expired"  # type: ignore[union-attr]
        assert not (await core.sandboxes.get(ME, made[0].id)).unrecorded


async def _states(core: Core, made: list[Any]) -> list[str]:
    return [(await core.sandboxes.get(ME, one.id)).state for one in made]


def stop_by_force(daemon: DaemonProcess) -> "subprocess.CompletedProcess[str]":
    words = [sys.executable, "-m", "atoll", "daemon", "stop", "--force"]
    env = {**os.environ, "PYTHONPATH": SOURCE, "ATOLL_HOME": str(daemon.home)}
    return subprocess.run(words, env=env, capture_output=True, text=True, timeout=2 * PATIENCE)


@pytest.mark.parametrize("damaged", (False, True))
def test_a_forced_stop_without_a_daemon_ends_what_runs(damaged: bool) -> None:
    """The daemon was killed, its store perhaps with it: what it started is ended all the same, and named."""
    daemon = DaemonProcess("[pool]\nfloor = 0\nceiling = 0\n")
    daemon.start()
    try:
        box = daemon.create(runtime=RUNTIMES[0])
        word = f"9{secrets.randbelow(10**8):08}"
        box.background(f"exec sleep {word}")
        until(lambda: running(box.id, word), "it is seen on this machine")
        daemon.kill()
        if damaged:
            for part in daemon.home.glob("atoll.db*"):
                part.unlink()
            (daemon.home / "atoll.db").write_bytes(b"this is no database" * 1000)
        found = stop_by_force(daemon)
        until(lambda: not running(box.id, word), "it has ended")
        if damaged:
            assert found.returncode != 0 and "not recorded" in found.stderr and box.id in found.stderr, found
        else:
            assert found.returncode == 0 and "stopped" in found.stdout, found
        again = stop_by_force(daemon)
        assert again.returncode != 0 and "not running" in again.stderr and "started" not in again.stderr, again
    finally:
        if damaged:
            (daemon.home / "atoll.db").unlink(missing_ok=True)
        daemon.close()


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_a_daemon_that_cannot_open_its_store_ends_what_runs_and_says_so(runtime: str, tmp_path: Path) -> None:
    daemon = DaemonProcess("[pool]\nfloor = 0\nceiling = 0\n")
    daemon.start()
    try:
        box = daemon.create(runtime=runtime)
        word = f"9{secrets.randbelow(10**8):08}"
        box.background(f"exec sleep {word}")
        until(lambda: running(box.id, word), "it is seen on this machine")
        daemon.kill()
        for part in daemon.home.glob("atoll.db*"):
            part.rename(tmp_path / part.name)
        try:
            (daemon.home / "atoll.db").write_bytes(b"this is no database" * 1000)
            start = [sys.executable, "-m", "atoll.server.daemon", "--home", str(daemon.home)]
            env = {**os.environ, "PYTHONPATH": SOURCE}
            found = subprocess.run(start, env=env, capture_output=True, text=True, timeout=2 * PATIENCE)
            assert found.returncode == 1 and box.id in found.stderr and "not recorded" in found.stderr, found.stderr
            until(lambda: not running(box.id, word), "it has ended")
        finally:
            for part in tmp_path.iterdir():
                shutil.move(part, daemon.home / part.name)
        daemon.start()
        assert box.info()["state"] == "ended" and box.info()["end"]["kind"] == "lost"
    finally:
        daemon.close()


def running(sandbox: str, word: str) -> list[str]:
    """The processes of this machine that are a sandbox's, by their words or their control group."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            words, group = (process / "cmdline").read_bytes(), (process / "cgroup").read_bytes()
        except OSError:
            continue
        if word.encode() in words or sandbox.encode() in words + group:
            found.append(process.name)
    return found
