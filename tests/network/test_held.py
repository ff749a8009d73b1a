"""`--require-approval host:GLOB`: a connection waits at the broker until a person has decided, whoever inside makes it."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from lab.network import OTHER, Box, Failed, Lab, client, until

from atoll.core.access.keys import Keys

BOTH = ["a.example", "b.example"]
# As patient as a person may be slow: nothing inside gives up before somebody has decided.
PROGRAM = (
    client.replace("20", "300")
    + """
def plain(name):
    with socket.create_connection((name, 80), 300) as sock:
        sock.sendall(b"GET / HTTP/1.1\\r\\nHost: " + name.encode() + b"\\r\\nConnection: close\\r\\n\\r\\n")
        return sock.makefile("rb").read().decode().replace("\\r\\n", " ")
"""
)


class Boss:
    """A person elsewhere, with a key that may approve and nothing else."""

    def __init__(self, lab: Lab) -> None:
        self.lab = lab
        keys = Keys(lab.home / "atoll.db")
        self.key = keys.create(f"boss-{os.urandom(4).hex()}", scopes=["approve"]).secret
        keys.close()

    def decide(self, approval: str, verb: str = "approve", *flags: str) -> "subprocess.CompletedProcess[bytes]":
        endpoint = (self.lab.home / "grpc.endpoint").read_text().split()[0]
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("ATOLL_", "K8E_"))}
        env = {**kept, "ATOLL_HOME": str(self.lab.home / "boss"), "PYTHONPATH": os.pathsep.join(sys.path),
               "K8E_SANDBOX_CERT": str(self.lab.home / "tls" / "sandbox-ca.crt")}  # fmt: skip
        words = ["sandbox", verb, approval, *flags, "--endpoint", endpoint, "--apikey", self.key]
        return self.lab.in_net(
            lambda: subprocess.run([sys.executable, "-m", "atoll", *words], capture_output=True, timeout=120, env=env)
        )

    def yes(self, approval: str) -> None:
        done = self.decide(approval)
        assert done.returncode == 0 and json.loads(done.stdout)["status"] == "approved", done

    def no(self, approval: str, reason: str) -> None:
        done = self.decide(approval, "reject", "--reason", reason)
        assert done.returncode == 0 and json.loads(done.stdout)["status"] == "rejected", done


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    if os.geteuid() != 0:
        pytest.skip("needs root")
    made = Lab()
    made.options = ["--grpc", "127.0.0.1:0"]
    made.start()
    yield made
    made.close()


def pending(lab: Lab, box: Box) -> list[dict[str, Any]]:
    return [one for one in lab.get("/v1/approvals")["approvals"] if one["sandbox_id"] == box.id]


def asked(lab: Lab, box: Box) -> dict[str, Any]:
    return dict(until(lambda: pending(lab, box), "somebody is asked")[0])


def trying(box: Box, expression: str) -> str:
    return str(box.exec(["python3", "-c", f"{PROGRAM}\nprint({expression})"], background=True)["command_id"])


def outcome(box: Box, command: str) -> str:
    return str(box.ended(command)["stdout"]).strip()


@pytest.mark.parametrize("runtime", ["container", "gvisor"])
def test_a_connection_waits_and_passes_when_approved(lab: Lab, runtime: str) -> None:
    if not lab.works(runtime):
        pytest.skip(f"{runtime} does not work here")
    boss, before = Boss(lab), lab.dialled(OTHER)
    box = lab.create(runtime=runtime, hosts=BOTH, require_approval=["host:B.*"])
    assert box.info()["require_approval"] == ["host:B.*"]
    assert outcome(box, trying(box, "tls('a.example')")) == "got tls:x", "what no rule names does not wait"
    first = trying(box, "tls('b.example')")
    waiting = asked(lab, box)
    assert (waiting["kind"], waiting["action"]) == ("host", "connect to b.example:443")
    assert lab.dialled(OTHER) == before, "nothing leaves before somebody has decided"
    second = trying(box, "tls('b.example')")
    until(lambda: lab.get(f"{box.path}/hosts")["open"] == 2, "both wait")
    assert [one["id"] for one in pending(lab, box)] == [waiting["id"]], "one question, however many wait"
    boss.yes(waiting["id"])
    assert outcome(box, first) == outcome(box, second) == "got tls:x"
    assert outcome(box, trying(box, "tls('b.example')")) == "got tls:x" and not pending(lab, box), (
        "it counts for a while"
    )
    plain = trying(box, "plain('b.example')")
    other = asked(lab, box)
    assert other["action"] == "connect to b.example:80", "another port is another question"
    boss.no(other["id"], "use https")
    answer = outcome(box, plain)
    assert answer.startswith("HTTP/1.1 403") and "needs approval, and was rejected: use https" in answer
    told = until(lambda: [event for event in lab.blocked(box) if event["port"] == 80], "the refusal is told")[0]
    assert (told["name"], told["reason"]) == ("b.example", "needs approval, and was rejected: use https")
    again = box.exec(["python3", "-c", f"{PROGRAM}\nprint(plain('b.example'))\nraise SystemExit(1)"])
    assert again["stdout"].startswith("HTTP/1.1 403") and not pending(lab, box), "a no counts for a while too"
    assert any("was rejected: use https" in one["note"] for one in again["blocked"]), "the run tells why"
    box.exec("true")
    lab.post(f"{box.path}/stop")
    lab.post(f"{box.path}/start")
    last = trying(box, "tls('b.example')")
    asked(lab, box)
    box.destroy()
    until(lambda: not pending(lab, box), "nobody is asked for a sandbox that is gone")
    assert last


def test_a_daemon_that_dies_is_a_no(lab: Lab) -> None:
    boss, before = Boss(lab), lab.dialled(OTHER)
    box = lab.create(hosts=BOTH, require_approval=["host:*"])
    first = trying(box, "tls('b.example')")
    old = asked(lab, box)["id"]
    lab.kill()
    (lab.home / "grpc.endpoint").unlink()
    lab.start()
    until((lab.home / "grpc.endpoint").exists, "the gateway listens")
    assert outcome(box, first).startswith("no ")
    assert lab.dialled(OTHER) == before and not pending(lab, box)
    late = boss.decide(old)
    assert late.returncode != 0 and b"was withdrawn" in late.stdout + late.stderr, late
    second = trying(box, "tls('b.example')")
    new = asked(lab, box)
    assert new["id"] != old
    boss.yes(new["id"])
    assert outcome(box, second) == "got tls:x"


def test_rules_do_not_widen_the_list_and_pass_to_subagents(lab: Lab) -> None:
    box = lab.create(hosts=["a.example"], require_approval=["host:*.example"])
    assert outcome(box, trying(box, "tls('b.example')")) == "no gaierror" and not pending(lab, box)
    child = Box(lab, lab.post(f"{box.path}/subagents", {})["id"])
    trying(child, "tls('a.example')")
    assert asked(lab, child)["action"] == "connect to a.example:443"
    with pytest.raises(Failed, match="permission_denied"):  # a program of the same user is no person
        lab.post(f"/v1/approvals/{asked(lab, child)['id']}/decide", {"approved": True})


def test_who_gives_up_is_told_why(lab: Lab) -> None:
    """Note in the result of a command that something still waits, and no longer once it was decided."""
    boss = Boss(lab)
    box = lab.create(hosts=BOTH, require_approval=["host:b.example"])
    hasty = client.replace("20", "5") + "print(tls('b.example'))"
    ran = box.run(hasty)
    approval = asked(lab, box)["id"]
    assert ran["stdout"].startswith("no ")
    assert [one["note"] for one in ran["blocked"]] == [
        f"held: b.example:443 waits for approval; decide with: atoll sandbox approve {approval}"
    ]
    boss.yes(approval)
    again = box.run(f"{PROGRAM}\nprint(tls('b.example'))")
    assert again["stdout"].strip() == "got tls:x" and not again["blocked"], "who tries again gets through"


def test_a_changed_list_ends_what_waits(lab: Lab) -> None:
    box = lab.create(hosts=BOTH, require_approval=["host:b.example"])
    before = lab.dialled(OTHER)
    waiting = trying(box, "tls('b.example')")
    asked(lab, box)
    lab.post(f"{box.path}/hosts", {"remove": ["b.example"]})
    assert outcome(box, waiting).startswith("no ")
    assert lab.get(f"{box.path}/hosts")["open"] == 0 and lab.dialled(OTHER) == before
    assert box.info()["policy"].get("held") == ["b.example"], "a change of the list keeps the rule"
