"""Approvals: who asks waits, who decides is somebody else, and each decision counts once."""

import json
import re
import subprocess

import pytest
from lab.daemon import Box, DaemonProcess, Failed, UnixConnection, until
from lab.terminal import PATIENCE, Atoll, Terminal, decide_at_terminal


def ask(box: Box, action: str = "delete everything") -> str:
    return str(box.daemon.post(f"{box.path}/approvals", {"action": action})["id"])


def finish(process: "subprocess.Popen[bytes]") -> tuple[int, dict[str, object], bytes]:
    out, err = process.communicate(timeout=PATIENCE)
    return process.returncode, json.loads(out), err


def waiting(daemon: DaemonProcess, sandbox: str) -> str:
    """The id of the approval of a sandbox that waits."""

    def look() -> str:
        found = daemon.get("/v1/approvals")["approvals"]
        return next((item["id"] for item in found if item["sandbox_id"] == sandbox), "")

    return str(until(look, "an approval is pending"))


def test_k8e_P25_confirm_blocks_until_a_person_approves(atoll: Atoll, box: Box) -> None:
    asking = atoll.start("sandbox", "confirm", f"sess-{box.id}", "drop the\x1b[2J table", "--timeout", "110")
    approval = waiting(box.daemon, box.id)
    seen = decide_at_terminal(atoll, approval, "--reason", "go on")
    assert re.search(rb"status +approved", seen)
    assert b"drop the\\x1b[2J table" in seen and b"\x1b[2J" not in seen
    code, answer, err = finish(asking)
    assert (code, answer["approved"], answer["reason"]) == (0, True, "go on")
    assert f"atoll sandbox approve {approval}".encode() in err


def test_a_rejection_reaches_who_asked_with_its_reason(atoll: Atoll, box: Box) -> None:
    asking = atoll.start("sandbox", "confirm", f"sess-{box.id}", "rm -rf", "--timeout", "110")
    decide_at_terminal(atoll, waiting(box.daemon, box.id), "--reject", "--reason", "too risky")
    code, answer, _ = finish(asking)
    assert (code, answer["approved"], answer["status"], answer["reason"]) == (1, False, "rejected", "too risky")


def test_k8e_P25_no_wait_gives_an_id_for_later(atoll: Atoll, box: Box) -> None:
    made = atoll.ok("sandbox", "confirm", f"sess-{box.id}", "deploy", "--no-wait")
    assert made["approved"] is False
    assert [item["approval_id"] for item in atoll.ok("sandbox", "approvals")["approvals"]] == [made["approval_id"]]
    still = atoll.fails("sandbox", "confirm", "--approval-id", made["approval_id"], "--timeout", "0.2")
    assert still["status"] == "pending"
    decide_at_terminal(atoll, made["approval_id"])
    assert atoll.ok("sandbox", "confirm", "--approval-id", made["approval_id"])["approved"] is True
    again = atoll.fails("sandbox", "confirm", "--approval-id", made["approval_id"])
    assert again["error"] == "failed_precondition", "an approval is used once"


def test_k8e_D25_a_second_decision_is_an_error(atoll: Atoll, box: Box) -> None:
    approval = ask(box)
    decide_at_terminal(atoll, approval)
    screen = Terminal(atoll.argv("sandbox", "approve", approval, "--reject"), atoll.env)
    assert b"was approved already" in screen.finish()


def test_k8e_D25_the_session_is_checked(daemon: DaemonProcess, box: Box) -> None:
    with pytest.raises(Failed) as caught:
        daemon.post("/v1/sandboxes/aaaaaaaaaaaaaaaaaaaa/approvals", {"action": "x"})
    assert caught.value.code == "not_found"
    with pytest.raises(Failed) as caught:
        daemon.post("/v1/approvals/approval-sess-none/decide", {"approved": True})
    assert caught.value.code == "not_found"
    with pytest.raises(Failed) as caught:
        daemon.post(f"{box.path}/approvals", {"action": "a\0b"})
    assert caught.value.code == "invalid_argument"


def test_who_stops_waiting_takes_the_request_back(box: Box) -> None:
    approval = ask(box)
    connection = UnixConnection(box.daemon.home / "daemon.sock")
    connection.request("POST", f"/v1/approvals/{approval}/wait", json.dumps({"timeout_s": 110}))
    for _ in range(5):  # requests are taken up in order: once these are answered, that one has begun
        assert box.daemon.get(f"/v1/approvals/{approval}")["status"] == "pending"
    connection.close()
    until(lambda: box.daemon.get(f"/v1/approvals/{approval}")["status"] == "withdrawn", "it is withdrawn")
    assert box.daemon.get("/v1/approvals")["approvals"] == []


def test_k8e_D40_approvals_survive_a_restart(own_daemon: DaemonProcess) -> None:
    box, atoll = own_daemon.create(), Atoll(own_daemon.home)
    approval = ask(box)
    own_daemon.kill()
    own_daemon.start()
    assert own_daemon.get(f"/v1/approvals/{approval}")["status"] == "pending"
    decide_at_terminal(atoll, approval)
    own_daemon.kill()
    own_daemon.start()
    assert own_daemon.post(f"/v1/approvals/{approval}/wait", {})["status"] == "approved"
