"""Volumes against a real daemon: shared between sandboxes, read-only where asked, sized, owned, not removed while used."""

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from lab.sandboxes import NO_SPARES, RUNTIMES, SMALL, Lab

from atoll import Sandbox
from atoll.errors import AtollError, InvalidArgument, NotFound


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    if os.geteuid() != 0:
        pytest.skip("needs root: an ordinary user cannot mount a disk of a given size")
    made = Lab(NO_SPARES)
    yield made
    made.close()


@pytest.fixture
def volume(lab: Lab) -> Iterator[str]:
    name = f"v{os.urandom(4).hex()}"
    assert lab.cli("volume", "create", name, "--size", "32").returncode == 0
    yield name
    assert lab.cli("volume", "rm", name).returncode == 0
    assert not any(path.is_dir() for path in (Path(lab.home) / "volumes").iterdir())


@pytest.fixture
def make(lab: Lab, volume: str) -> Iterator[Callable[..., Sandbox]]:
    made: list[Sandbox] = []

    def create(runtime: str, *volumes: dict[str, object]) -> Sandbox:
        box = Sandbox.create(home=lab.home, runtime=runtime, volumes=volumes, **SMALL)
        made.append(box)
        return box

    yield create
    for box in made:
        box.destroy()


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_two_sandboxes_share_a_volume(make: Callable[..., Sandbox], volume: str, runtime: str) -> None:
    one = make(runtime, {"name": volume, "target": "/data"})
    other = make(runtime, {"name": volume, "target": "/mnt/deep/data"})
    reader = make(runtime, {"name": volume, "target": "/data", "read_only": True})
    assert one.exec("mkdir /data/d && echo first > /data/d/f && chown 1000:1000 /data/d/f").exit_code == 0
    assert other.exec(
        "cat /mnt/deep/data/d/f; stat -c %u /mnt/deep/data/d/f; echo second >> /mnt/deep/data/d/f"
    ).stdout == ("first\n1000\n")
    assert reader.exec("cat /data/d/f").stdout == "first\nsecond\n"
    refused = reader.exec("echo x > /data/x; rm /data/d/f; mount -o remount,rw /data; echo x > /data/x")
    assert refused.exit_code != 0 and one.exec("ls /data").stdout == "d\n"
    one.destroy()
    assert other.exec("cat /mnt/deep/data/d/f").stdout == "first\nsecond\n"
    later = make(runtime, {"name": volume, "target": "/data"})
    assert later.exec("cat /data/d/f").stdout == "first\nsecond\n"


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_a_volume_is_no_larger_than_its_size(make: Callable[..., Sandbox], volume: str, runtime: str) -> None:
    box = make(runtime, {"name": volume, "target": "/data"})
    full = box.exec("dd if=/dev/zero of=/data/f bs=1M count=64")
    assert full.exit_code != 0 and "No space left" in full.stderr
    assert box.exec("rm /data/f && echo back > /data/f && cat /data/f").stdout == "back\n"


def test_a_volume_in_use_is_not_removed(lab: Lab, make: Callable[..., Sandbox], volume: str) -> None:
    box = make(RUNTIMES[0], {"name": volume, "target": "/data"})
    box.exec("echo kept > /data/f")
    for _ in range(2):  # running, then stopped
        refused = lab.cli("volume", "rm", volume)
        assert refused.returncode != 0 and b"in use" in refused.stderr
        box.stop()
    box.restart()
    assert box.exec("cat /data/f").stdout == "kept\n"
    listed = json.loads(lab.cli("volume", "list", "--json").stdout)["volumes"]
    assert [one["used_by"] for one in listed if one["name"] == volume] == [[box.id]]


def test_what_is_wrong_with_a_volume_is_told(lab: Lab, make: Callable[..., Sandbox], volume: str) -> None:
    assert b"already" in lab.cli("volume", "create", volume).stderr
    for words in (("create", "../x"), ("create", "y", "--size", "1"), ("rm", "no-such")):
        assert lab.cli("volume", *words).returncode != 0
    runtime = RUNTIMES[0]
    with pytest.raises(NotFound, match="no volume"):
        make(runtime, {"name": "no-such", "target": "/data"})
    for target in ("/data/../x", "data", "/"):
        with pytest.raises(InvalidArgument):
            make(runtime, {"name": volume, "target": target})
    with pytest.raises(AtollError, match="not a place"):
        make(runtime, {"name": volume, "target": "/proc/x"})
    with pytest.raises(InvalidArgument, match="same place"):
        make(runtime, {"name": volume, "target": "/d"}, {"name": volume, "target": "/d"})


def test_a_volume_outlives_the_daemon(lab: Lab, make: Callable[..., Sandbox], volume: str) -> None:
    assert lab.cli("run", "--volume", f"{volume}:/data", "sh", "-c", "echo kept > /data/f").returncode == 0
    assert lab.cli("daemon", "stop", "--force").returncode == 0
    ran = lab.cli("run", "--volume", f"{volume}:/data:ro", "sh", "-c", "cat /data/f; echo x > /data/f || echo refused")
    assert ran.stdout == b"kept\nrefused\n", ran.stderr
