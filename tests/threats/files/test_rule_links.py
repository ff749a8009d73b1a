"""F2-M5: a `path:` rule holds a write wherever links lead it, as the agent of each runtime resolves them."""

from typing import Any

import pytest
from lab.sandboxes import Lab, UnixConnection, until

from atoll import Sandbox

WAYS = (
    "/etc/motd",
    "/proc/self/root/etc/motd",
    "/proc/1/root/etc/motd",
    "/workspace/link/motd",
    "/workspace/file",
    "/workspace/link/x/../motd",
)


def asked(lab: Lab, box: str, target: str) -> dict[str, Any]:
    """The approval that a write waits for; the caller then leaves."""
    before = {one["id"] for one in waiting(lab, box)}
    connection = UnixConnection(f"{lab.home}/daemon.sock")
    try:
        connection.request("PUT", f"/v1/sandboxes/{box}/files?path={target}", b"changed")
        new = until(lambda: [one for one in waiting(lab, box) if one["id"] not in before], f"{target} waits")
        return dict(new[0])
    finally:
        connection.close()


def waiting(lab: Lab, box: str) -> list[Any]:
    return [one for one in lab.ask("GET", "/v1/approvals")[1]["approvals"] if one["sandbox_id"] == box]


@pytest.mark.parametrize("target", WAYS)
def test_a_write_through_links_is_held(lab: Lab, ruled: Sandbox, target: str) -> None:
    found = asked(lab, ruled.id, target)
    assert found["kind"] == "write" and "/etc/motd" in found["action"]


@pytest.fixture(scope="module")
def ruled(lab: Lab, runtime: str) -> Any:
    with lab.sandbox(runtime=runtime, require_approval=["path:/etc/*"]) as made:
        made.exec("mkdir -p /etc/x; ln -s /etc /workspace/link; ln -s link/motd /workspace/file")
        made.files.write("/workspace/free", "not held")
        yield made


SWAP = """
import os
os.makedirs("/workspace/real", exist_ok=True)
turn = 0
while not os.path.exists("/workspace/stop"):
    os.symlink(("/etc", "real")[turn % 2], "/workspace/next")
    os.rename("/workspace/next", "/workspace/swapped")
    turn += 1
"""
WRITES = 64


def test_a_link_that_is_swapped_all_the_time(lab: Lab, ruled: Sandbox) -> None:
    """Writes go where they were judged to go, or nowhere, while a program inside turns the link around."""
    before = ruled.exec("cat /etc/motd; ls /etc").stdout
    swapper = ruled.start(["python3", "-c", SWAP])
    try:
        until(lambda: ruled.exec("test -L /workspace/swapped").exit_code == 0, "the link is there")
        callers = [UnixConnection(f"{lab.home}/daemon.sock") for _ in range(WRITES)]
        for number, caller in enumerate(callers):
            name = f"/workspace/swapped/{'motd' if number % 2 else 'planted'}"
            caller.request("PUT", f"/v1/sandboxes/{ruled.id}/files?path={name}", b"changed")
        until(lambda: ruled.exec("test -e /workspace/real/motd").exit_code == 0, "one that is not held was written")
        ruled.files.write("/workspace/stop", "")
        swapper.wait()
        for caller in callers:
            caller.close()
    finally:
        swapper.kill()
    assert ruled.exec("cat /etc/motd; ls /etc").stdout == before
