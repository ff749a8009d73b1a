"""Accounts: what each holder holds, its caps, and that everything is given back at the end of its holder."""

import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lab.daemon import DaemonProcess

from atoll import accounts, config, errors
from atoll.accounts import CONNECTIONS, KINDS, MEMORY, TOTAL, Accounts, Lease, owner, sandbox, stranger

CAPS = {"sandbox": {MEMORY: 10}, "owner": {MEMORY: 15}, "total": {MEMORY: 24}}
ANN, BOB = owner("key:ann"), owner("key:bob")


def test_a_charge_counts_for_each_holder_and_the_total_or_for_none() -> None:
    books = Accounts(CAPS)
    books.charge(MEMORY, 10, sandbox("a"), ANN)
    books.charge(CONNECTIONS, 3, ANN)
    assert books.snapshot() == {
        "sandbox a": {MEMORY: 10},
        "owner key:ann": {MEMORY: 10, CONNECTIONS: 3},
        "total": {MEMORY: 10, CONNECTIONS: 3},
    }
    for holders, role in (((sandbox("a"), ANN), "sandbox"), ((sandbox("b"), ANN), "owner")):
        before = books.snapshot()
        with pytest.raises(errors.Exhausted) as full:
            books.charge(MEMORY, 6, *holders)
        assert full.value.code == "exhausted" and full.value.details["account"] == role
        assert full.value.details["kind"] == MEMORY and f"[accounts.{role}]" in full.value.hint
        assert books.snapshot() == before
    books.release(MEMORY, 4, sandbox("a"), ANN)
    assert books.held(MEMORY, ANN) == books.held(MEMORY) == 6
    books.release(MEMORY, 100, sandbox("a"), ANN)
    books.release(CONNECTIONS, 3, ANN)
    assert books.snapshot() == {}


def test_the_last_eighth_is_kept_for_who_holds_nothing() -> None:
    books = Accounts({"total": {MEMORY: 80}})
    books.charge(MEMORY, 70, ANN)
    with pytest.raises(errors.Exhausted, match="all callers together"):
        books.charge(MEMORY, 1, ANN)
    books.charge(MEMORY, 10, BOB)
    with pytest.raises(errors.Exhausted):
        books.charge(MEMORY, 1, stranger("192.0.2.1"))
    assert books.held(MEMORY, TOTAL) == 80


def test_the_end_of_a_holder_gives_back_what_others_were_charged_with_it() -> None:
    books = Accounts(CAPS)
    books.charge(MEMORY, 5, sandbox("a"), ANN)
    lease = books.lease(MEMORY, 5, sandbox("a"), ANN)
    books.charge(MEMORY, 2, sandbox("b"), ANN)
    books.end(sandbox("a"))
    assert books.snapshot() == {"sandbox b": {MEMORY: 2}, "owner key:ann": {MEMORY: 2}, "total": {MEMORY: 2}}
    books.charge(MEMORY, 3, sandbox("a"), ANN)  # an id that comes again begins anew
    lease.grow(1)  # nobody is left to charge
    lease.end()
    assert books.held(MEMORY, sandbox("a")) == 3
    books.end(ANN)
    assert books.snapshot() == {}


def test_a_lease_grows_shrinks_and_ends_with_its_block() -> None:
    books = Accounts(CAPS)
    with pytest.raises(ZeroDivisionError), books.lease(MEMORY, 1, ANN) as lease:
        lease.grow(9)
        lease.shrink(3)
        assert books.held(MEMORY, ANN) == lease.amount == 7
        with pytest.raises(errors.Exhausted):
            lease.grow(9)
        assert books.held(MEMORY, ANN) == lease.amount == 7
        _ = 1 // 0
    lease.end()
    assert books.snapshot() == {}


@given(
    st.lists(st.tuples(st.sampled_from("cglses"), st.sampled_from("ab"), st.sampled_from("xy"), st.integers(0, 9))),
)
@settings(max_examples=200, deadline=None)
def test_no_order_of_events_passes_a_cap_or_leaves_anything(events: list[tuple[str, str, str, int]]) -> None:
    books, leases = Accounts(CAPS), list[Lease]()
    for what, box, name, amount in events:
        holders = (sandbox(box), owner(name))
        try:
            if what == "c":
                books.charge(MEMORY, amount, *holders)
            elif what == "l":
                leases.append(books.lease(MEMORY, amount, *holders))
            elif what == "g" and leases:
                leases[amount % len(leases)].grow(amount)
            elif what == "s" and leases:
                leases[amount % len(leases)].shrink(amount)
            elif what == "e":
                books.end(holders[amount % 2])
        except errors.Exhausted:
            pass
        held = books.snapshot()
        assert all(0 < total[MEMORY] <= CAPS[who.partition(" ")[0]][MEMORY] for who, total in held.items())
        boxes = sum(total[MEMORY] for who, total in held.items() if who.startswith("sandbox"))
        assert boxes == books.held(MEMORY)
    for lease in leases:
        lease.end()
    for name in "abxy":
        books.end(sandbox(name))
        books.end(owner(name))
    assert books.snapshot() == {} and not books._records and not books._charged


def test_threads_lose_no_count() -> None:
    books = Accounts()

    def work() -> None:
        for _ in range(2000):
            with books.lease(MEMORY, 1, ANN):
                pass

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert books.snapshot() == {}


def test_strangers_are_told_apart_by_what_they_cannot_choose() -> None:
    assert stranger("2001:db8::1") == stranger("2001:db8::ffff") != stranger("2001:db8:0:1::1")
    assert stranger("::ffff:192.0.2.1") == stranger("192.0.2.1") != stranger("192.0.2.2")
    assert stranger("fe80::1%eth0").name == "fe80::/64"


def test_caps_come_from_the_config_and_are_shown() -> None:
    settings = config.parse("[accounts.owner]\nmemory_mb = 3\nconnections = 7\n")
    caps = settings.accounts.caps()
    assert caps["owner"][MEMORY] == 3 << 20 and caps["owner"][CONNECTIONS] == 7
    assert all(set(caps[role]) == set(KINDS) for role in ("sandbox", "owner", "stranger", "total"))
    assert config.show(settings)["accounts"]["owner"]["memory_mb"] == 3
    assert all(accounts.setting(kind) in config.show(settings)["accounts"]["total"] for kind in KINDS)
    with pytest.raises(errors.InvalidArgument, match="did you mean"):
        config.parse("[accounts.owner]\nmemory = 3\n")
    with pytest.raises(errors.InvalidArgument):
        config.parse("[accounts.total]\nmemory_mb = -1\n")


def test_all_accounts_are_zero_after_everything_is_destroyed(daemon: DaemonProcess) -> None:
    box = daemon.create()
    box.exec("head -c 300000 /dev/zero; printf x > f; ls")
    box.exec("sleep 100", background=True)
    box.files("list", path="/")
    box.destroy()
    assert daemon.get("/v1/accounts") == {"accounts": {}}
