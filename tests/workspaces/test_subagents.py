"""Sub-agents: a sandbox of their own on the parent's workspace, never more and never longer than the parent."""

import threading
from typing import Any

import pytest
from lab.daemon import Box, DaemonProcess, Failed, until
from lab.terminal import Atoll


def subagent(box: Box, **fields: Any) -> Box:
    return Box(box.daemon, box.daemon.post(f"{box.path}/subagents", fields)["id"])


def refused(box: Box, **fields: Any) -> str:
    with pytest.raises(Failed) as caught:
        subagent(box, **fields)
    return str(caught.value.code)


def test_k8e_P24_two_subagents_work_in_parallel_on_the_parents_files(atoll: Atoll, box: Box) -> None:
    box.exec("echo 42 > /workspace/input")
    names = [atoll.ok("sandbox", "subagent", f"sess-{box.id}")["session_id"] for _ in range(2)]
    assert all(name.startswith(f"sess-{box.id}-sub-") for name in names)
    seen: dict[str, bytes] = {}

    def work(name: str) -> None:
        code = f"cat /workspace/input; echo done > /workspace/{name}"
        seen[name] = atoll("sandbox", "run", "--raw", "--session-id", name, code).stdout

    threads = [threading.Thread(target=work, args=(name,)) for name in names]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(seen.values()) == {b"42\n"}
    assert all(box.read(f"/workspace/{name}") == b"done\n" for name in names)
    assert atoll.fails("sandbox", "subagent", names[0])["error"] == "permission_denied"


def test_k8e_D30_a_subagent_is_a_sandbox_of_its_own(box: Box) -> None:
    other = subagent(box)
    assert other.exec("exit 7")["exit_code"] == 7
    other.exec("echo private > /tmp/private; touch /etc/private")
    assert box.exec("ls /tmp/private /etc/private")["exit_code"] != 0
    assert other.info()["parent_id"] == box.id and box.info()["parent_id"] is None
    other.destroy()
    assert box.exec("true")["exit_code"] == 0, "the parent does not end with its sub-agent"


def test_nothing_of_it_is_wider_than_the_parent(daemon: DaemonProcess) -> None:
    box = daemon.create(hosts=["example.com"])
    assert refused(box, limits={"memory_mb": 4096}) == "permission_denied"
    assert refused(box, limits={"pids": 100_000}) == "permission_denied"
    assert refused(box, hosts=["example.com", "example.org"]) == "permission_denied"
    assert refused(box, hosts=["*"]) == "permission_denied"
    other = subagent(box, limits={"memory_mb": 128})
    info = other.info()
    assert info["hosts"] == ["example.com"]
    assert info["limits"]["memory_mb"]["value"] == 128 and info["limits"]["pids"]["value"] == 128
    assert info["expires_at"] <= box.info()["expires_at"] + 1
    box.destroy()


def test_it_ends_with_its_parent(daemon: DaemonProcess) -> None:
    for verb in ("destroy", "stop"):
        box = daemon.create(persistent=True)
        other = subagent(box)
        daemon.delete(box.path) if verb == "destroy" else daemon.post(f"{box.path}/stop")
        assert other.info()["state"] == "ended"
        assert other.info()["end"]["detail"] == "its parent ended"
        box.destroy()
    assert daemon.get("/v1/sandboxes")["sandboxes"] == []


def test_a_stopped_parent_has_no_subagents(daemon: DaemonProcess) -> None:
    box = daemon.create(persistent=True)
    daemon.post(f"{box.path}/stop")
    assert refused(box) == "failed_precondition"
    box.destroy()


def test_both_survive_a_restart_and_still_belong_together(own_daemon: DaemonProcess) -> None:
    box = own_daemon.create()
    other = subagent(box)
    own_daemon.kill()
    own_daemon.start()
    other.exec("echo later > /workspace/later")
    assert box.read("/workspace/later") == b"later\n"
    box.destroy()
    until(lambda: other.info()["state"] == "ended", "the sub-agent ends")
