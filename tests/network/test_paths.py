"""EGR-11 on real sandboxes: whichever way a sandbox comes to life or comes back, its first program finds its list in force."""

import os
import signal
from collections.abc import Callable, Iterator

import pytest
from lab.network import ALLOWED, OTHER, Box, Lab, client, until

# The allowed host answers; a host that is not listed has no name, and its address, were it known, cannot be reached.
PROBE = (
    client
    + f"""
def dial(address):
    try:
        socket.create_connection((address, 443), 20).close()
        return "got"
    except OSError as error:
        return "no " + type(error).__name__
print(dial("{OTHER}"), "/", dial("169.254.169.254"), "/", tls("b.example"), "/", tls("a.example"))
"""
)
SHUT = "no ConnectionRefusedError / no ConnectionRefusedError / no gaierror"


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    if os.geteuid() != 0:
        pytest.skip("needs root")
    made = Lab()
    made.start()
    made.post("/v1/daemon/pin")  # spares are kept
    yield made
    made.close()


def cold(lab: Lab, runtime: str, hosts: list[str]) -> Box:
    return lab.create(runtime=runtime, hosts=hosts, name=f"cold-{os.urandom(4).hex()}")  # no spare has a name


def started_later(lab: Lab, runtime: str, hosts: list[str]) -> Box:
    box = lab.create(runtime=runtime, hosts=hosts, start=False)
    lab.post(f"{box.path}/start")
    return box


def claimed(lab: Lab, runtime: str, hosts: list[str]) -> Box:
    lab.create(runtime=runtime, hosts=["b.example"]).destroy()  # from now on spares of this kind are kept

    def spare() -> bool:
        return any(kind["runtime"] == runtime and kind["ready"] for kind in lab.get("/v1/health")["pool"]["kinds"])

    def claim() -> Box | None:
        until(spare, "a spare is ready")
        hits = lab.get("/v1/health")["pool"]["hits"]
        box = lab.create(runtime=runtime, hosts=hosts)
        if lab.get("/v1/health")["pool"]["hits"] > hits:
            return box
        box.destroy()  # the spare was replaced at that very moment
        return None

    return until(claim, "a spare is claimed")


def stopped_and_started(lab: Lab, runtime: str, hosts: list[str]) -> Box:
    box = lab.create(runtime=runtime, hosts=["b.example"])
    lab.post(f"{box.path}/hosts", {"hosts": hosts})
    lab.post(f"{box.path}/stop")
    lab.post(f"{box.path}/start")
    return box


def paused_and_resumed(lab: Lab, runtime: str, hosts: list[str]) -> Box:
    box = lab.create(runtime=runtime, hosts=["b.example"])
    lab.post(f"{box.path}/pause")
    lab.post(f"{box.path}/hosts", {"hosts": hosts})
    lab.post(f"{box.path}/resume")
    return box


def restored(lab: Lab, runtime: str, hosts: list[str]) -> Box:
    box = lab.create(runtime=runtime, hosts=["b.example"])
    name = f"paths-{box.id}"
    lab.post(f"{box.path}/snapshots", {"name": name})
    box.destroy()
    made = lab.post(f"/v1/snapshots/{name}/restore", {"sandbox": {"runtime": runtime, "hosts": hosts}})
    lab.delete(f"/v1/snapshots/{name}")
    return Box(lab, made["id"])


def subagent(lab: Lab, runtime: str, hosts: list[str]) -> Box:
    parent = lab.create(runtime=runtime, hosts=["b.example"])
    lab.post(f"{parent.path}/hosts", {"hosts": hosts})  # it inherits what is in force, not what was asked for once
    return Box(lab, lab.post(f"{parent.path}/subagents", {})["id"])


def outlived_its_daemon(lab: Lab, runtime: str, hosts: list[str]) -> Box:
    box = lab.create(runtime=runtime, hosts=hosts)
    lab.kill()
    lab.start()
    lab.post("/v1/daemon/pin")
    return box


def outlived_its_broker(lab: Lab, runtime: str, hosts: list[str]) -> Box:
    box = lab.create(runtime=runtime, hosts=hosts)
    old = lab.get("/v1/egress")["broker_pid"]
    os.kill(old, signal.SIGKILL)
    until(lambda: lab.get("/v1/egress")["broker_pid"] != old, "another broker runs")
    lab.post(f"{box.path}/hosts", {"hosts": hosts})  # answered when it has the list
    return box


PATHS = (
    cold, started_later, claimed, stopped_and_started, paused_and_resumed, restored, subagent, outlived_its_daemon,
    outlived_its_broker,
)  # fmt: skip


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.__name__)
def test_the_list_is_in_force(lab: Lab, runtime: str, path: Callable[[Lab, str, list[str]], Box]) -> None:
    """Reach the one allowed host and nothing else, with the first program that runs on that path."""
    before = lab.dialled(OTHER)
    box = path(lab, runtime, ["a.example"])
    try:
        assert box.run(PROBE)["stdout"].strip() == f"{SHUT} / got tls:x"
        assert lab.dialled(OTHER) == before and lab.dialled(ALLOWED) >= 1
        policy = box.info()["policy"]
        assert policy["network"] == "hosts" and policy["hosts"] == ["a.example"]
    finally:
        box.destroy()
    if runtime != "container":
        return  # the same code, once more with an empty list, costs a minute
    empty = path(lab, runtime, [])
    try:
        assert empty.run(PROBE)["stdout"].strip() == f"{SHUT} / no gaierror"
        assert lab.dialled(OTHER) == before
    finally:
        empty.destroy()
