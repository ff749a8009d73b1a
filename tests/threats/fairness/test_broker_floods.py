"""Availability between tenants: whatever sandboxes send to the broker, a neighbour's lookup with a GET goes on.

With a few sandboxes it is counted: how many turns of the broker's loop the neighbour waits at most. With twenty, in the long run, it is
measured: at most three times as long as beside twenty sandboxes that only compute.
"""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from lab.broker_floods import FLOODS
from lab.broker_world import FairWorld, Waits, show
from lab.internet import can_make_networks, wait_for
from lab.sandboxes import LONG

pytestmark = [pytest.mark.serial] if LONG else []  # turns can be counted beside other tests; times cannot be measured
BOUND = 3.0
FEW, MANY = 8, 20
MOST_TURNS = 4
CAP_SYS_NICE = 23
ENOUGH_SECONDS = 0.02  # of the broker's processor time, so that there was a flood


def make_world(sandboxes: int) -> Iterator[FairWorld]:
    if not can_make_networks():
        pytest.skip("needs root to make network namespaces")
    made = FairWorld(sandboxes)
    try:
        made.measure(10)
        yield made
    finally:
        made.close()


def may_raise_priority() -> bool:
    lines = Path("/proc/self/status").read_text().splitlines()
    rights = next(int(line.split()[1], 16) for line in lines if line.startswith("CapEff:"))
    return bool(rights >> CAP_SYS_NICE & 1)


def priorities(world: FairWorld) -> list[int]:
    """The nice values of the broker and, where the kernel shares processors out by session, of its session."""
    pid = world.egress.broker_pid
    group = Path(f"/proc/{pid}/autogroup")
    said = group.read_text().split() if group.exists() else []  # its name, "nice" and a number
    return [os.getpriority(os.PRIO_PROCESS, pid), *(int(number) for number in said[-1:])]


@pytest.fixture(scope="module")
def few() -> Iterator[FairWorld]:
    yield from make_world(FEW)


@pytest.fixture(scope="module")
def many() -> Iterator[FairWorld]:
    yield from make_world(MANY)


@pytest.mark.parametrize("kind", FLOODS)
def test_a_neighbour_waits_for_few_turns(few: FairWorld, kind: str) -> None:
    """Count turns of the loop, which no other program on the machine adds to."""
    pid, before = few.egress.broker_pid, few.used()
    few.act(kind)
    wait_for("the flood is under way", lambda: few.used() - before > ENOUGH_SECONDS)
    took = few.measure(10)
    few.act("stop")
    turns, used = few.near.counters()["longest_wait"], few.used() - before
    show(f"{kind}: {turns} turns, {used:.2f} s for the flood; slowest {max(took):.0f} ms")
    assert few.egress.broker_pid == pid, "the broker was replaced"
    assert turns <= MOST_TURNS


def test_the_broker_goes_before_programs_that_compute(few: FairWorld) -> None:
    """Its priority counts among sessions too, where the kernel shares processors out by session."""
    if not may_raise_priority():
        pytest.skip("needs CAP_SYS_NICE")
    wait_for("it is preferred", lambda: max(priorities(few)) < 0)


def test_the_broker_is_not_preferred_while_a_crowd_waits(few: FairWorld) -> None:
    """Preferred without end it would take a whole processor from the neighbour's program."""
    if not may_raise_priority():
        pytest.skip("needs CAP_SYS_NICE")
    wait_for("it is preferred", lambda: max(priorities(few)) < 0)
    few.act("small_packets")
    wait_for("it gave its priority up", lambda: min(priorities(few)) == 0)
    few.measure(10)
    few.act("stop")
    wait_for("it is preferred again", lambda: max(priorities(few)) < 0)


@pytest.mark.skipif(not LONG, reason="only in the long run: some minutes of all processors")
@pytest.mark.parametrize("kind", FLOODS)
def test_neighbour_beside_a_flood(many: FairWorld, kind: str) -> None:
    """Measure the neighbour beside the flood and beside programs that only compute, in turns; more often where it is close."""
    pid = many.egress.broker_pid
    waits = many.compare(kind, 3, Waits())
    if waits.worst > BOUND:
        many.compare(kind, 2, waits)
    show(f"{kind}: {waits}")
    assert many.egress.broker_pid == pid, "the broker was replaced"
    assert waits.worst <= BOUND and waits.usual <= BOUND, str(waits)
