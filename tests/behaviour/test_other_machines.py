"""Machines unlike ours: disks the host unmounts, private groups, other engines' state files, several id ranges."""

import json
import os
import pwd
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from lab.sandboxes import ROOTLESS, Lab, until

from atoll import config, ownership
from atoll.backends.local import bundle
from atoll.backends.local.backend import _engine_state
from atoll.backends.local.seen import Seen

MOUNTS = pytest.mark.skipif(ROOTLESS, reason="only root can mount a disk on the host")


@pytest.fixture
def shared_place(tmp_path: Path) -> Iterator[Path]:
    """A directory whose mounts are told to other mount namespaces, as every directory of a systemd machine is."""
    place = tmp_path / "place"
    place.mkdir()
    subprocess.run(["mount", "--bind", place, place], check=True)
    subprocess.run(["mount", "--make-shared", place], check=True)
    yield place
    subprocess.run(["umount", "-R", place], check=False)


def mount_disk(place: Path) -> str:
    """Mount a small loop disk below `place`; its loop device."""
    image, target = place.parent / "disk.img", place / "disk"
    subprocess.run(["truncate", "-s", "8M", image], check=True)
    subprocess.run(["mkfs.ext4", "-q", image], check=True)
    target.mkdir()
    subprocess.run(["mount", "-o", "loop", image, target], check=True)
    return subprocess.run(["findmnt", "-no", "SOURCE", target], capture_output=True, text=True).stdout.strip()


def attached(device: str) -> bool:
    return Path(f"/sys/block/{Path(device).name}/loop/backing_file").exists()


@MOUNTS
def test_distro_5_a_disk_the_host_unmounts_is_free(lab: Lab, runtime: str, shared_place: Path) -> None:
    device = mount_disk(shared_place)
    with lab.sandbox(runtime=runtime) as box:
        assert box.exec(["true"]).exit_code == 0
        assert attached(device)
        subprocess.run(["umount", shared_place / "disk"], check=True)
        until(lambda: not attached(device), "the disk is in use by nobody")
        assert box.exec(["true"]).exit_code == 0


@MOUNTS
def test_distro_5_what_the_host_mounts_later_stays_outside(lab: Lab, runtime: str, shared_place: Path) -> None:
    (shared_place / "inner").mkdir()
    mounts = [{"source": str(shared_place), "target": "/mnt/place", "read_only": True}]
    with lab.sandbox(runtime=runtime, mounts=mounts) as box:
        subprocess.run(["mount", "-t", "tmpfs", "tmpfs", shared_place / "inner"], check=True)
        (shared_place / "inner" / "secret").write_text("not for the sandbox")
        assert box.exec(["ls", "/mnt/place/inner"]).stdout == ""
        assert "inner" in box.exec(["ls", "/mnt/place"]).stdout


def test_distro_1_the_id_map_is_written_line_by_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the launcher makes it: runc since 1.1.15 refuses a map that is not the one of the namespace."""
    real = Path.read_text

    def read(self: Path, *args: object, **kwargs: object) -> str:
        if str(self) in ("/proc/self/uid_map", "/proc/self/gid_map"):
            return "         0       1000          1\n         1     100000      65536\n"
        return real(self, *args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(Path, "read_text", read)
    made = json.loads(
        bundle.configuration(
            root="/r",
            hostname="h",
            base=0,
            count=65536,
            user_ns="/u",
            net_ns="/n",
            cgroup=None,
            shm_mb=64,
            seen=Seen(0, 0),
        )
    )
    lines = [{"containerID": 0, "hostID": 0, "size": 1}, {"containerID": 1, "hostID": 1, "size": 65535}]
    assert made["linux"]["uidMappings"] == made["linux"]["gidMappings"] == lines


def test_distro_3_the_state_of_each_engine_is_read(tmp_path: Path) -> None:
    (tmp_path / "runc").mkdir()
    (tmp_path / "runc" / "state.json").write_text('{"init_process_pid": 12, "init_process_start": 345}')
    (tmp_path / "crun").mkdir()
    (tmp_path / "crun" / "status").write_text('{"pid": 67, "process-start-time": 890, "cgroup-path": ""}')
    assert _engine_state(tmp_path / "runc") == (12, 345)
    assert _engine_state(tmp_path / "crun") == (67, 890)


def test_distro_6_a_private_group_is_its_user(tmp_path: Path) -> None:
    """With umask 002 a user's files are writable by its group, in which it is alone."""
    file = tmp_path / "config.toml"
    file.write_text("[limits]\nmemory_mb = 300\n")
    file.chmod(0o664)
    assert config.load(tmp_path).limits.memory_mb == 300  # root's and a user's own group has nobody else
    file.chmod(0o666)
    with pytest.raises(config.errors.PermissionDenied, match="written by others"):
        config.load(tmp_path)


@pytest.mark.skipif(ROOTLESS, reason="only root can give a file to another group")
def test_distro_6_a_group_with_others_in_it_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    file.write_text("[limits]\nmemory_mb = 300\n")
    file.chmod(0o664)
    nobody = pwd.getpwnam("nobody")
    os.chown(file, 0, nobody.pw_gid)  # a group with somebody else in it
    with pytest.raises(config.errors.PermissionDenied, match="written by others"):
        config.load(tmp_path)
    assert ownership.writable_by_others(file.stat())
