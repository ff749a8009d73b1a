"""SNP-08 and SNP-11: a restored sandbox has files and nothing else of the old one; its policy is today's."""

import pytest
from lab.daemon import Box, DaemonProcess, Failed


def restored(daemon: DaemonProcess, name: str, **sandbox: object) -> Box:
    return Box(daemon, daemon.post(f"/v1/snapshots/{name}/restore", {"sandbox": sandbox})["id"])


def test_approvals_aliases_and_names_stay_with_the_old_one(daemon: DaemonProcess) -> None:
    box = daemon.create(name="old", alias="other-name", env={"TOKEN": "canary"}, labels={"k8e.session": "mine"})
    box.exec("echo x > /workspace/x")
    approval = daemon.post(f"{box.path}/approvals", {"action": "a"})["id"]
    daemon.post(f"{box.path}/snapshots", {"name": "auth"})
    child = restored(daemon, "auth")
    info = child.info()
    assert info["id"] != box.id and info["name"] is None and info["labels"] == {} and info["env_keys"] == []
    assert info["parent_id"] is None
    assert child.exec("echo $TOKEN")["stdout"] == "\n"
    assert [one["sandbox_id"] for one in daemon.get("/v1/approvals")["approvals"]] == [box.id]
    assert daemon.get(f"/v1/approvals/{approval}")["sandbox_id"] == box.id
    assert daemon.get(f"{child.path}/exposures")["exposures"] == []
    box.destroy()
    assert child.read("/workspace/x") == b"x\n", "the child does not depend on where it came from"
    child.destroy()
    daemon.delete("/v1/snapshots/auth")


def test_the_policy_of_a_restored_sandbox_is_todays(daemon: DaemonProcess) -> None:
    loose = daemon.create(hosts=["*"], lifetime_s=100_000)
    daemon.post(f"{loose.path}/snapshots", {"name": "loose"})
    loose.destroy()
    default = daemon.create()
    child = restored(daemon, "loose")
    assert child.info()["hosts"] == default.info()["hosts"]
    assert child.info()["policy"] == default.info()["policy"]
    tight = restored(daemon, "loose", network=False, limits={"memory_mb": 64})
    assert tight.info()["policy"]["network"] == "none"
    for box in (default, child, tight):
        box.destroy()
    daemon.delete("/v1/snapshots/loose")


def test_a_bad_request_for_the_new_sandbox_makes_none(daemon: DaemonProcess, box: Box) -> None:
    daemon.post(f"{box.path}/snapshots", {"name": "req"})
    for sandbox in (
        {"runtime": "no-such"},
        {"limits": {"memory_mb": -1}},
        {"mounts": [{"source": "x", "target": "y"}]},
    ):
        with pytest.raises(Failed):
            restored(daemon, "req", **sandbox)
    assert [one["id"] for one in daemon.get("/v1/sandboxes")["sandboxes"]] == [box.id]
    daemon.delete("/v1/snapshots/req")
