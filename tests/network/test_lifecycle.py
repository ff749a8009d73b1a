"""K8E D20 and EGR-11 on real sandboxes: no path through a sandbox's life has a moment without its policy."""

import os
import signal
import socket
import threading
from pathlib import Path

import pytest
from lab.network import ALLOWED, OTHER, Box, Failed, Lab, client, hosts, until

TRY = client + "print(fetch('http://a.example/')[:3], fetch('http://b.example/')[:3])"
LOOP = (
    client
    + """
import time, sys
seen = set()
while True:
    seen.add(fetch("http://b.example/")[:3] + tls("b.example", address=sys.argv[1])[:3])
    open("/workspace/seen", "w").write(" ".join(sorted(seen)))
    time.sleep(0.02)
"""
)


def reach(box: Box) -> str:
    return " ".join(box.run(TRY)["stdout"].split())


def broker(lab: Lab) -> int:
    return int(lab.get("/v1/egress")["broker_pid"])


def test_policy_holds_while_the_daemon_is_away(own_lab: Lab) -> None:
    """Kill the daemon under an attacker that never stops trying: nothing passes meanwhile, and the list is in force after."""
    box = own_lab.create(hosts=["a.example"])
    assert reach(box) == "got no"
    box.daemon.post(
        f"{box.path}/run", {"code": LOOP, "args": [OTHER], "language": "python", "background": True, "timeout_ms": 0}
    )
    until(lambda: box.files("list", path="/workspace")["count"], "the attacker is at work")
    own_lab.kill()
    own_lab.start()
    assert reach(box) == "got no"
    assert box.info()["hosts"] == ["a.example"] and hosts(box, add=["c.example"])["hosts"] == ["a.example", "c.example"]
    own_lab.terminate()
    own_lab.start()
    assert box.info()["hosts"] == ["a.example", "c.example"] and reach(box) == "got no"
    assert box.read("/workspace/seen") == b"no no "
    assert own_lab.dialled(OTHER) == 0


def test_a_killed_broker_is_replaced(own_lab: Lab) -> None:
    """Kill the broker in traffic: nothing leaks, another takes over with every list in force."""
    first, second = own_lab.create(hosts=["a.example"]), own_lab.create(hosts=["b.example"])
    assert reach(first) == "got no"
    old = broker(own_lab)
    os.kill(old, signal.SIGKILL)
    until(lambda: broker(own_lab) != old, "another broker runs")
    until(lambda: reach(first) == "got no", "the first list is in force again")
    until(lambda: reach(second) == "no got", "the second list is in force again")
    before = own_lab.dialled(OTHER)
    assert reach(first) == "got no" and own_lab.dialled(OTHER) == before


def test_both_die(own_lab: Lab) -> None:
    """Kill broker and daemon: the next daemon connects the sandbox anew, or ends it; it never runs without its policy."""
    box = own_lab.create(hosts=["a.example"])
    kill_both(own_lab)
    own_lab.start()
    state = box.info()["state"]
    assert state in ("running", "ended")
    if state == "running":
        until(lambda: reach(box) == "got no", "its list is in force again")
    assert own_lab.dialled(OTHER) == 0


def kill_both(lab: Lab) -> None:
    pid = broker(lab)
    lab.kill()
    os.kill(pid, signal.SIGKILL)
    until(
        lambda: not Path(f"/proc/{pid}").exists() or Path(f"/proc/{pid}/stat").read_text().split()[2] == "Z", "it died"
    )


def break_egress(lab: Lab) -> Path:
    """Make the next start of egress fail: a file is where its directory should be."""
    place = Path(lab.home) / "egress"
    place.rename(Path(lab.home) / "egress-before")
    place.write_text("in the way")
    return place


def test_distro_7_a_failed_start_of_the_broker_is_tried_again(own_lab: Lab) -> None:
    """Give new sandboxes a network as soon as the cause is gone; say the cause until then."""
    kill_both(own_lab)
    place = break_egress(own_lab)
    own_lab.start()
    assert not own_lab.get("/v1/egress")["works"]
    with pytest.raises(Failed):
        own_lab.create(hosts=["a.example"])
    place.unlink()
    until(lambda: own_lab.get("/v1/egress")["works"], "the broker is started again")
    assert reach(own_lab.create(hosts=["a.example"])) == "got no"


def test_distro_7_sandboxes_wait_for_a_broker_that_starts_late(own_lab: Lab) -> None:
    """Connect the sandboxes of an earlier daemon again although the first start of the broker fails."""
    box = own_lab.create(hosts=["a.example"])
    kill_both(own_lab)
    place = break_egress(own_lab)
    mend = threading.Timer(2, place.unlink)
    mend.start()
    own_lab.start()
    mend.join()
    assert box.info()["state"] == "running"
    until(lambda: reach(box) == "got no", "its list is in force again")


@pytest.mark.parametrize("persistent", [False, True])
def test_a_stopped_sandbox_comes_back_with_its_list(lab: Lab, persistent: bool) -> None:
    """Keep a list that was changed live through stop and start, and through pause and resume."""
    box = lab.create(hosts=["b.example"], persistent=persistent)
    hosts(box, hosts=["a.example"])
    lab.post(f"{box.path}/stop")
    lab.post(f"{box.path}/start")
    assert reach(box) == "got no"
    lab.post(f"{box.path}/pause")
    hosts(box, hosts=["b.example"])
    lab.post(f"{box.path}/resume")
    assert reach(box) == "no got"
    lab.post(f"{box.path}/stop")
    hosts(box, hosts=[])
    lab.post(f"{box.path}/start")
    assert reach(box) == "no no"
    box.destroy()


def test_an_ended_sandbox_leaves_no_link(lab: Lab) -> None:
    """Remove the link and the broker's record of a sandbox that has ended, and keep its traffic in the events."""
    box = lab.create(hosts=["a.example"])
    assert reach(box) == "got no"
    box.destroy()
    events = lab.get(f"{box.path}/events?limit=1000")["events"]
    traffic = [event for event in events if event["kind"] == "traffic"]
    assert traffic[0]["hosts"]["a.example"]["connections"] == 1
    assert lab.get(f"{box.path}/hosts")["used"] == {}


def test_a_forced_stop_ends_the_broker(own_lab: Lab) -> None:
    """Leave no process behind."""
    own_lab.create(hosts=["a.example"])
    pid = broker(own_lab)
    own_lab.post("/v1/daemon/stop", {"force": True})
    assert own_lab.process is not None
    own_lab.process.wait(60)
    until(
        lambda: not Path(f"/proc/{pid}").exists() or Path(f"/proc/{pid}/stat").read_text().split()[2] == "Z", "it ended"
    )


def test_the_broker_is_nobody(lab: Lab) -> None:
    """Run the broker as an id of its own, with no capability and no way to get one."""
    status = Path(f"/proc/{broker(lab)}/status").read_text()
    fields = dict(line.split(":", 1) for line in status.splitlines() if ":" in line)
    assert "0" not in fields["Uid"].split() and "0" not in fields["Gid"].split()
    for name in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"):
        assert int(fields[name], 16) == 0, name
    assert fields["NoNewPrivs"].strip() == "1"
    assert fields["Groups"].strip() == ""


def test_the_machine_is_left_alone(lab: Lab) -> None:
    """Change nothing of the namespace the daemon is in: no interface, no switch, no rule."""

    def look() -> tuple[object, ...]:
        forward = Path("/proc/sys/net/ipv4/ip_forward").read_text()
        return (
            sorted(name for _, name in socket.if_nameindex()),
            forward,
            Path("/proc/thread-self/net/route").read_text(),
        )

    before = lab.in_net(look)
    box = lab.create(hosts=["a.example"])
    assert reach(box) == "got no" and lab.dialled(ALLOWED) >= 1
    assert lab.in_net(look) == before
    box.destroy()
