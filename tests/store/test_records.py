"""The records, on every database that can hold them: what is written is read back, and what must be one step is one."""

import asyncio
import time

import pytest
from lab.records import Open, approval, command, sandbox

from atoll import errors
from atoll.core.access.keys import Keys
from atoll.core.store.records import LIVE, MAX_ENDED, Store
from atoll.errors import AlreadyExists, Exhausted, Unauthenticated


def test_a_sandbox_is_found_by_id_name_and_alias_of_its_owner_alone(open_database: Open) -> None:
    store = Store(open_database())
    store.add_sandbox(sandbox("a", record={"limits": {"pids": {"value": 3, "enforced": True}}}), ["short"], 9)
    for word in ("id-a", "a", "short"):
        found = store.find_sandbox("me", word)
        assert found is not None and found["id"] == "id-a" and store.find_sandbox("you", word) is None
    assert found["created_at"] == 1.5 and found["record"]["limits"]["pids"]["value"] == 3  # type: ignore[index]
    (listed,) = store.list_sandboxes("me", LIVE, None)
    assert listed["record"]["limits"]["pids"]["enforced"] is True
    store.update_sandbox("id-a", last_active=12.125, record={"policy": {"hosts": ["x"]}})
    store.close()
    again = Store(open_database())
    kept = again.sandbox("id-a")
    assert kept is not None and kept["last_active"] == 12.125 and kept["record"]["policy"]["hosts"] == ["x"]
    again.close()


def test_names_aliases_and_places_are_taken_once(open_database: Open) -> None:
    store = Store(open_database())
    store.add_sandbox(sandbox("a"), ["x"], 2)
    with pytest.raises(AlreadyExists):
        store.add_sandbox(sandbox("a", id="other"), [], 9)
    with pytest.raises(AlreadyExists):
        store.add_sandbox(sandbox("b"), ["x"], 9)
    assert store.sandbox("id-b") is None, "nothing is left of a create that was refused"
    store.add_sandbox(sandbox("b"), [], 2)
    with pytest.raises(Exhausted):
        store.add_sandbox(sandbox("c"), [], 2)
    store.end_sandbox("id-a", "destroyed", "", "me")
    store.add_sandbox(sandbox("a", id="next"), ["x"], 2)
    found = store.find_sandbox("me", "x")
    assert found is not None and found["id"] == "next" and store.count_live() == 2
    store.close()


def test_an_end_forgets_values_and_loses_commands(open_database: Open) -> None:
    store = Store(open_database())
    store.add_sandbox(sandbox("a", spec={"env": {"TOKEN": "secret"}, "labels": {"l": "v"}}), [], 9)
    store.add_command("id-a", "one", command("one"))
    store.end_sandbox("id-a", "oom", "too large", "atoll", 77.5)
    row, (ran,) = store.sandbox("id-a"), store.commands("id-a")
    assert row is not None and row["spec"] == {"env": {"TOKEN": ""}, "labels": {"l": "v"}}
    assert (row["state"], row["end_kind"], row["ended_at"]) == ("ended", "oom", 77.5)
    assert (ran["status"], ran["ended_at"]) == ("lost", 77.5)
    assert store.ended() == [("me", "id-a")] and not store.living()
    store.close()


def test_old_and_many_ends_are_purged_with_what_is_theirs(open_database: Open) -> None:
    store = Store(open_database())
    now = time.time()
    for number in range(3):
        store.add_sandbox(sandbox(f"s{number}"), [], 9)
        store.add_event(f"id-s{number}", "me", "created", {}, now)
    store.end_sandbox("id-s0", "idle", "", "me", 1.0)
    store.end_sandbox("id-s1", "idle", "", "me", now)
    assert store.purge() == ["id-s0"] and MAX_ENDED > 1
    assert [one["sandbox_id"] for one in store.events("me", None, limit=9, after=None)] == ["id-s1", "id-s2"]
    store.close()


async def test_commands_keep_their_order_and_late_writes_are_seen(open_database: Open) -> None:
    store = Store(open_database())
    for number in range(3):
        store.add_command("s", f"c{number}", command(f"c{number}", started_at=float(number), background=number == 1))
    with pytest.raises(AlreadyExists):
        store.add_command("s", "c0", command("c0"))
    store.later(lambda: store.update_command("s", "c1", status="completed", exit={"exit_code": 3}))
    assert [one["id"] for one in store.commands("s", 2)] == ["c1", "c2"]
    found = store.command("s", "c1")
    assert found is not None and found["exit"] == {"exit_code": 3} and found["argv"] == ["echo", "c1"]
    assert [one["id"] for one in store.running_commands("s")] == ["c0", "c2"]
    assert store.knows_command("s", "c1") and not store.knows_command("t", "c1")
    await asyncio.sleep(0)
    store.close()


def test_events_have_rising_numbers_and_pages(open_database: Open) -> None:
    store = Store(open_database())
    numbers = [store.add_event("s", "me", "kind", {"n": n}, float(n)) for n in range(5)]
    assert numbers == sorted(set(numbers))
    assert [one["data"]["n"] for one in store.events("me", "s", limit=2, after=None)] == [3, 4]
    assert [one["data"]["n"] for one in store.events("me", None, limit=2, after=numbers[1])] == [2, 3]
    assert not store.events("you", "s", limit=9, after=None)
    store.close()


def test_an_approval_moves_once(open_database: Open) -> None:
    store = Store(open_database())
    store.add_approval(approval("one"))
    assert store.move_approval("one", "pending", status="approved", decided_by="key:k")
    assert not store.move_approval("one", "pending", status="denied")
    found = store.approval("one")
    assert found is not None and found["status"] == "approved" and found["sessions"] == [1, 2]
    assert not store.approvals("id-a")
    store.drop_approvals(5.0)
    assert store.approval("one") is None
    store.close()


@pytest.mark.parametrize("text", ["é\U0001f600", "half a pair \ud800", "nothing \0 here"])
def test_any_text_in_a_record_is_read_back(open_database: Open, text: str) -> None:
    store = Store(open_database())
    store.add_sandbox(sandbox("a", spec={"labels": {"l": text}}), [], 9)
    found = store.sandbox("id-a")
    assert found is not None and found["spec"]["labels"]["l"] == text
    store.close()


def test_a_transaction_that_fails_leaves_nothing(open_database: Open) -> None:
    store = Store(open_database())
    with pytest.raises(ValueError, match="halfway"), store.transaction():
        store.set_meta("a", "1")
        raise ValueError("halfway")
    assert store.meta("a") is None
    store.set_meta("a", "1")
    store.set_meta("a", "2")
    assert store.meta("a") == "2"
    store.close()


def test_keys_are_made_known_renamed_and_revoked(open_database: Open) -> None:
    keys = Keys(open_database())
    made = keys.create("team", scopes=("use", "approve"), quotas={"sandboxes": 3})
    assert keys.authenticate(made.secret).quotas == {"sandboxes": 3} and keys.authenticate(made.e2b).name == "team"
    with pytest.raises(AlreadyExists):
        keys.create("team")
    other = Keys(open_database())
    assert [one.name for one in other.list()] == ["team"]
    other.revoke("team")
    with pytest.raises(Unauthenticated):
        keys.authenticate(made.secret)
    assert keys.create("team").key.id != made.key.id and len(keys.list(revoked=True)) == 2
    for one in (keys, other):
        one.close()


def test_a_database_of_a_newer_atoll_is_refused(open_postgres: Open) -> None:
    database = open_postgres()
    database.change("UPDATE atoll_schema SET version = version + 1")
    with pytest.raises(errors.FailedPrecondition, match="newer atoll"):
        open_postgres()
