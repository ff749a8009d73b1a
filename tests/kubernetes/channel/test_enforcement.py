"""Canaries that a gateway has dialled now and then, by a real agent: open without a policy, and shut with one."""

import subprocess

import pytest
from lab.pods import POD, Pod
from lab.waiting import eventually

from atoll.backends.kubernetes.agents import Agents
from atoll.backends.kubernetes.enforcement import Candidate, Enforcement, choose
from atoll.errors import Unsupported

POLICY = "add table inet p; add chain inet p o { type filter hook output priority 0; policy drop; }; "
POLICY += "add rule inet p o oifname lo accept; add rule inet p o ct state established accept"
NOWHERE = ("127.0.0.1", 1)  # in place of the API server; an address of loopback is left out


async def test_creates_are_refused_while_a_pod_gets_out(pod: Pod) -> None:
    """Shown open first. With a policy the next look says so, and a create looks again by itself."""
    one = Candidate("pod-a", "n1", POD, pod.fingerprint, in_use=False, made="")
    enforcement = Enforcement(Agents(pod.key), lambda: NOWHERE, lambda: [one], every_s=0.2)
    await enforcement.check()  # nothing is known yet
    enforcement.start()
    try:
        await eventually(lambda: enforcement.rounds, "a round is over")
        with pytest.raises(Unsupported, match="node n1") as refused:
            await enforcement.check()
        assert refused.value.details == {"reason": "egress_unenforceable", "node": "n1", "pod": "pod-a"}
        pod.inside(lambda: subprocess.run(["nft", POLICY], check=True))
        await enforcement.check()
    finally:
        await enforcement.close()


async def test_a_pod_that_does_not_answer_leaves_what_was_known(pod: Pod) -> None:
    one = Candidate("pod-a", "n1", POD, pod.fingerprint, in_use=True, made="")
    there = [one]
    enforcement = Enforcement(Agents(pod.key), lambda: NOWHERE, lambda: there, every_s=3600)
    await enforcement._look()
    there[:] = [Candidate("pod-b", "n1", POD, "0" * 64, in_use=True, made="")]  # somebody else, as far as is known
    with pytest.raises(Unsupported):
        await enforcement.check()
    there[:] = [Candidate("pod-c", "n2", POD, "0" * 64, in_use=True, made="")]  # the node is gone
    await enforcement.check()


def test_of_each_node_the_newest_waiting_pod_and_one_in_use_are_asked() -> None:
    waiting = [
        Candidate(f"w{n}", f"n{n % 2}", "", "", in_use=False, made=f"2026-01-0{n}T00:00:00Z") for n in range(1, 7)
    ]
    used = [Candidate(f"u{n}", "n1", "", "", in_use=True, made="") for n in range(3)]
    chosen = choose([*used, *waiting])
    assert {one.pod for one in chosen if not one.in_use} == {"w5", "w6"}
    assert len([one for one in chosen if one.in_use]) == 1
