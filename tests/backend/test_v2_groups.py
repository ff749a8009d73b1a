"""An ordinary user's groups on the kernel's real v2 hierarchy. Where v1 owns memory, pids and cpu, as on hybrid hosts, another
controller stands in for them: the rules of delegation, killing and freezing are the same for all."""

import errno
import os
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from atoll.backends.contract import Limits
from atoll.backends.local.kernel import cgroups
from atoll.backends.local.kernel.cgroups import Groups, Hierarchies

BOX = "a" * 20


@pytest.fixture
def controller(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """One that v2 has here, given on by the root group."""
    unified = Hierarchies.detect().unified
    if os.geteuid() != 0 or unified is None:
        pytest.skip("needs root and cgroup v2")
    found = [
        name for name in (unified / "cgroup.controllers").read_text().split() if name in ("pids", "memory", "hugetlb")
    ]
    if not found:
        pytest.skip("v2 has no controller here")
    name = found[-1] if "pids" not in found else "pids"
    given = name in (unified / "cgroup.subtree_control").read_text().split()
    if not given:
        (unified / "cgroup.subtree_control").write_text(f"+{name}")
    monkeypatch.setattr(cgroups, "_CONTROLLERS", (name,))
    yield name
    if not given:
        with suppress(OSError):  # somebody else may use it by now
            (unified / "cgroup.subtree_control").write_text(f"-{name}")


@pytest.fixture
def session(controller: str) -> Iterator[Path]:
    """A login session with a process in it, below a group that was given to the user."""
    unified = Hierarchies.detect().unified
    assert unified is not None
    top = unified / f"atoll-test-{os.urandom(4).hex()}"
    (top / "session").mkdir(parents=True)
    shell = subprocess.Popen(["sleep", "600"])
    try:
        (top / "session" / "cgroup.procs").write_text(str(shell.pid))
        yield top / "session"
    finally:
        shell.kill()
        shell.wait()
        for root, _, _ in os.walk(top, topdown=False):
            os.rmdir(root)


@pytest.fixture
def inside() -> Iterator["subprocess.Popen[bytes]"]:
    """What will be in the sandbox's group."""
    process = subprocess.Popen(["sleep", "600"])
    yield process
    process.kill()
    process.wait()


async def test_sandboxes_get_their_groups_beside_the_session(
    session: Path, controller: str, inside: "subprocess.Popen[bytes]", tmp_path: Path
) -> None:
    """The kernel refuses it in the session itself; one above it works, and what is in the group freezes and dies with it."""
    top, own = session.parent, tmp_path / "own"
    own.write_text(f"0::/{top.name}/session\n")
    (top / "cgroup.subtree_control").write_text(f"+{controller}")
    with pytest.raises(OSError) as refused:  # control: a group with processes cannot give controllers on
        (session / "cgroup.subtree_control").write_text(f"+{controller}")
    assert refused.value.errno == errno.EBUSY
    found = Hierarchies(session.parents[1], {}).delegated(str(own))
    assert found.top(session.parents[1]) == top
    groups = Groups("0" * 8, found)
    groups.rootless = True
    groups.prepare()
    group = groups.create(BOX)
    place = top / "atoll" / ("0" * 8) / BOX
    assert controller in (place / "cgroup.controllers").read_text().split()
    assert list(place.glob(f"{controller}.*max"))  # its limits can be set there
    if controller == "pids":
        assert group.apply(Limits(pids=50))["pids"] and (place / "pids.max").read_text() == "58\n"
    for door in group.doors():
        Path(door).write_text(str(inside.pid))
    assert group.pids() == [inside.pid]
    await group.freeze(True)
    await group.freeze(False)
    assert inside.poll() is None
    await group.kill()
    assert inside.wait() == -9
    await group.remove()
    groups.remove_empty()
    assert not place.exists() and not place.parent.exists()
