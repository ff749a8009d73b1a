"""F2-H5: a home without room. Nobody is promised space that is not there, and what has to end still ends.

The home is a small file system of its own (a loop-mounted image), so that it can really be filled. The filling is done
by the test itself, to the last block: the worst that a sandbox, a key or another program of the machine could do.
"""

import json
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from lab.sandboxes import NO_SPARES, ROOTLESS, Lab, alive, until

from atoll import Sandbox, errors
from atoll.core.access.audit import verify

HOME_MB = 600
DISK_MB = 32
MEMORY: dict[str, Any] = {"network": False, "memory_mb": 128, "pids": 128, "disk_mb": DISK_MB}

pytestmark = pytest.mark.skipif(
    ROOTLESS or shutil.which("mkfs.ext4") is None, reason="an ordinary user can mount no file system of its own"
)


class SmallLab(Lab):
    """A daemon whose home is a file system of `HOME_MB`."""

    def __init__(self, config: str = NO_SPARES) -> None:
        super().__init__(config)
        written = (Path(self.home) / "config.toml").read_text()
        self._image = tempfile.mktemp(prefix="atb-small-", suffix=".img")
        with open(self._image, "wb") as file:
            file.truncate(HOME_MB << 20)
        subprocess.run(["mkfs.ext4", "-q", "-F", "-m", "0", self._image], check=True)
        subprocess.run(["mount", "-o", "loop", self._image, self.home], check=True)
        (Path(self.home) / "config.toml").write_text(written)
        self.filler = Path(self.home) / "somebody-elses-file"

    def fill(self) -> None:
        """Take the last free byte of the home. What is just being freed is taken too."""
        with open(self.filler, "ab", buffering=0) as file:
            for piece in (1 << 20, 4096):
                quiet = 0
                while quiet < 3:
                    try:
                        file.write(bytes(piece))
                        quiet = 0
                    except OSError:
                        os.sync()
                        quiet += 1
        assert self.free() < 4096 * 8, self.free()

    def free(self) -> int:
        there = os.statvfs(self.home)
        return there.f_bavail * there.f_frsize

    def make_room(self) -> None:
        self.filler.unlink()

    def used(self, *names: str) -> int:
        """Bytes on the disk below these directories of the home."""
        files = (path for name in names for path in Path(self.home, name).rglob("*") if path.is_file())
        return sum(path.stat().st_blocks * 512 for path in files)

    def close(self) -> None:
        try:
            self.filler.unlink(missing_ok=True)
            super().close()
        finally:
            subprocess.run(["umount", "-l", self.home], check=True)
            os.unlink(self._image)
            shutil.rmtree(self.home, ignore_errors=True)


@contextmanager
def small_home(config: str = NO_SPARES) -> Iterator[SmallLab]:
    made = SmallLab(config)
    try:
        yield made
    finally:
        made.close()


@pytest.fixture
def small() -> Iterator[SmallLab]:
    with small_home() as made:
        yield made


def pid_of(box: Sandbox) -> int:
    return int(box.info().wire["pid"])


def state_of(lab: Lab, ident: str) -> str:
    return str(lab.ask("GET", f"/v1/sandboxes/{ident}")[1]["state"])


# Space is promised once


def test_no_more_is_promised_than_there_is(small: SmallLab, runtime: str) -> None:
    """Two disks of 200 MB do not fit into a home of 600 MB that keeps a reserve; one does, and again after it has gone."""
    first = small.create(runtime=runtime, **{**MEMORY, "disk_mb": 200})
    with pytest.raises(errors.DiskFull) as caught:
        small.create(runtime=runtime, **{**MEMORY, "disk_mb": 200})
    assert "promised" in caught.value.message and caught.value.hint
    wrote = first.exec("dd if=/dev/urandom of=/workspace/f bs=1M count=150 && sync")
    assert wrote.ok, wrote.stderr
    first.stop()
    with pytest.raises(errors.DiskFull):  # a stopped sandbox keeps its disk, so it keeps its promise
        small.create(runtime=runtime, **{**MEMORY, "disk_mb": 200})
    first.destroy()
    until(lambda: small.free() > 450 << 20, "its disk is gone")
    small.create(runtime=runtime, **{**MEMORY, "disk_mb": 200}).destroy()


def test_the_account_outlives_the_daemon(small: SmallLab) -> None:
    small.create(runtime="container", **{**MEMORY, "disk_mb": 200})
    os.kill(small.start(), signal.SIGKILL)
    small.start()
    with pytest.raises(errors.DiskFull):
        small.create(runtime="container", **{**MEMORY, "disk_mb": 200})


# Three ways to fill


def test_kept_output_has_a_cap(small: SmallLab, runtime: str) -> None:
    """Short commands in the background, each leaving 8 MiB on the host: the sandbox's cap holds, the newest are readable."""
    box = small.create(runtime=runtime, **MEMORY)
    flood = "head -c 4194304 /dev/zero | tr '\\0' a; head -c 4194304 /dev/zero | tr '\\0' b >&2"
    last = ""
    for _ in range(16):
        ask = {"command": flood, "background": True, "output_limit": 4 << 20}
        status, answer = small.ask("POST", f"/v1/sandboxes/{box.id}/exec", ask)
        assert status < 300, answer
        last = answer["command_id"]
        where = f"/v1/sandboxes/{box.id}/commands/{last}"
        until(lambda where=where: small.ask("GET", where)[1]["status"] != "running", "it has ended")
    assert small.used("runs") <= 66 << 20, small.used("runs")
    answer = small.ask("GET", f"/v1/sandboxes/{box.id}/commands/{last}")[1]
    assert answer["stdout"] == "a" * (4 << 20)
    box.destroy()


def test_a_refused_call_writes_little(small: SmallLab) -> None:
    """What one caller sends is never a record of more than a few KiB, and the record names what was cut by its hash."""
    box = small.create(runtime="container", **MEMORY)
    before = sum(path.stat().st_size for path in Path(small.home, "audit").glob("audit*.jsonl"))
    for _ in range(20):
        small.ask("POST", f"/v1/sandboxes/{box.id}/exec", {"argv": ["nosuch"] + ["é" * 500] * 31})
    after = sum(path.stat().st_size for path in Path(small.home, "audit").glob("audit*.jsonl"))
    assert (after - before) / 20 < 5 << 10, after - before
    lines = Path(small.home, "audit", "audit.jsonl").read_text().splitlines()
    cut = [record for line in lines if "cut" in (record := json.loads(line)["record"])["details"]]
    assert len(cut) == 20 and len(cut[0]["details"]["cut"]["sha256"]) == 64
    stored = Path(small.home, "atoll.db-wal").stat().st_size + Path(small.home, "atoll.db").stat().st_size
    assert stored < 20 << 20, stored
    box.destroy()


# On a full disk


def test_everything_ends_on_a_full_disk(small: SmallLab, runtime: str) -> None:
    """Destroy, stop and a deadline work; what cannot be done is refused with words; afterwards the daemon goes on."""
    boxes = {name: small.create(runtime=runtime, name=name, **MEMORY) for name in ("gone", "rests", "due", "stays")}
    assert boxes["stays"].exec("echo acknowledged > /workspace/kept && sync").ok
    pids = {name: pid_of(box) for name, box in boxes.items()}
    small.fill()
    status, said = small.ask("POST", "/v1/sandboxes", {"runtime": runtime, "network": False})
    assert status == 507 and said["error"]["code"] == "disk_full", said
    # A deadline
    status, said = small.ask("POST", f"/v1/sandboxes/{boxes['due'].id}/extend", {"lifetime_s": 1.0})
    deadline_set = status < 300
    # Destroy and remove, by the API and by the command line
    status, said = small.ask("DELETE", f"/v1/sandboxes/{boxes['gone'].id}")
    assert status < 300 and said["state"] == "ended", said
    small.fill()  # what its disk gave back is taken at once
    until(lambda: not alive(pids["gone"]), "destroyed means that nothing of it runs")
    stopped = small.cli("stop", "rests")
    assert stopped.returncode == 0, stopped
    until(lambda: not alive(pids["rests"]), "stopped means that nothing of it runs")
    small.fill()
    if deadline_set:
        until(lambda: not alive(pids["due"]), "the deadline is kept")
    removed = small.cli("remove", "rests")
    assert removed.returncode == 0, removed
    assert alive(pids["stays"])
    small.make_room()
    until(lambda: small.ask("GET", "/v1/health")[1]["ok"] and _create_works(small, runtime), "the daemon goes on")
    assert boxes["stays"].exec("cat /workspace/kept").stdout == "acknowledged\n"
    until(lambda: state_of(small, boxes["gone"].id) == "ended", "its end is on record")
    assert state_of(small, boxes["rests"].id) == "ended"
    ended = [r for r in _audit(small) if r["action"] == "destroy" and r["sandbox"] == boxes["gone"].id]
    assert ended, "the destroy is in the log, now or then"
    boxes["stays"].destroy()
    assert verify(Path(small.home, "audit")).ok


def test_deadlines_hold_on_a_full_disk(small: SmallLab, runtime: str) -> None:
    """The reaper ends what is due although nothing can be written any more."""
    box = small.create(runtime=runtime, lifetime=6.0, **MEMORY)
    pid, expires = pid_of(box), box.info().expires_at
    small.fill()
    assert expires is not None
    until(lambda: time.time() > expires, "the deadline has passed")
    until(lambda: not alive(pid), "nothing of it runs")
    until(lambda: state_of(small, box.id) == "ended", "and it is said to have ended")
    log = Path(small.home, "daemon.log").read_text()
    assert "Traceback" not in log, log[-3000:]


def test_a_daemon_starts_on_a_full_disk_and_ends_things(small: SmallLab, runtime: str) -> None:
    """Killed with the disk full, the next one adopts, refuses creates in words, destroys, and stops by force truthfully."""
    kept, other = (small.create(runtime=runtime, name=name, **MEMORY) for name in ("kept", "other"))
    pids = [pid_of(kept), pid_of(other)]
    small.fill()
    os.kill(small.start(), signal.SIGKILL)
    small.fill()
    small.start()
    assert all(alive(pid) for pid in pids)
    status, said = small.ask("POST", "/v1/sandboxes", {"runtime": runtime, "network": False})
    assert status == 507, said
    status, said = small.ask("DELETE", f"/v1/sandboxes/{kept.id}")
    assert status < 300 and said["state"] == "ended", said
    small.fill()
    stopped = small.cli("daemon", "stop", "--force")
    assert stopped.returncode == 0 and b"stopped" in stopped.stdout, stopped
    assert not any(alive(pid) for pid in pids), "stopped means that nothing runs"
    small.fill()
    small.start()  # and again, with nothing but the reserve
    small.make_room()
    until(lambda: _create_works(small, runtime), "the daemon goes on")
    assert state_of(small, other.id) == "ended" and state_of(small, kept.id) == "ended"
    assert verify(Path(small.home, "audit")).ok


def test_nothing_acknowledged_is_lost(small: SmallLab) -> None:
    """Every command that was answered is on record after the disk was full and the daemon was killed."""
    box = small.create(runtime="container", **MEMORY)
    answered = [box.exec(["/bin/true"]).command_id for _ in range(20)]
    small.fill()
    refused = 0
    while not refused and len(answered) < 5000:
        try:
            answered.append(box.exec(["/bin/true", *["x" * 400] * 8]).command_id)
        except errors.AtollError as error:
            assert error.message, "refused with words"
            refused += 1
    assert refused, "a full disk takes no more work"
    os.kill(small.start(), signal.SIGKILL)
    small.make_room()
    small.start()
    lost = [one for one in answered if small.ask("GET", f"/v1/sandboxes/{box.id}/commands/{one}")[0] != 200]
    assert not lost, f"{len(lost)} of {len(answered)}: {lost[:5]}"
    begun = [r for r in _audit(small) if r["action"] == "commands.exec" and r["result"] == "begun"]
    assert len(begun) >= len(answered)
    box.destroy()
    assert verify(Path(small.home, "audit")).ok


def _create_works(lab: SmallLab, runtime: str) -> bool:
    try:
        lab.create(runtime=runtime, **MEMORY).destroy()
    except errors.AtollError:
        return False
    return True


def _audit(lab: Lab) -> list[dict[str, Any]]:
    records: list[dict[str, Any]] = lab.ask("GET", "/v1/audit?limit=10000")[1]["records"]
    return records
