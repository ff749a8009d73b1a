"""Several gateways on one PostgreSQL, and a PostgreSQL that goes away."""

import threading
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout

import pytest
from lab.postgres import Postgres
from lab.records import Open, approval, sandbox
from lab.waiting import PATIENCE, until

from atoll.core.store import postgres as driver
from atoll.core.store import schema
from atoll.core.store.database import StoreFailed
from atoll.core.store.postgres import PostgresDatabase
from atoll.core.store.records import Store
from atoll.errors import AlreadyExists, Exhausted

GATEWAYS = 4


def test_gateways_that_create_at_once_never_exceed_the_count_or_share_a_name(open_postgres: Open) -> None:
    """Each wants ten, and one name each that all want; there is room for twelve."""
    stores = [Store(open_postgres()) for _ in range(GATEWAYS)]
    together = threading.Barrier(GATEWAYS)

    def create(number: int) -> tuple[int, int]:
        made = shared = 0
        together.wait()
        for one in range(10):
            for name in (f"n{number}-{one}", f"all-{one}"):
                try:
                    stores[number].add_sandbox(sandbox(name, id=f"{number}-{name}"), [], 12)
                    made += 1
                    shared += name.startswith("all")
                except (Exhausted, AlreadyExists):
                    pass
        return made, shared

    with ThreadPoolExecutor(GATEWAYS) as threads:
        found = list(threads.map(create, range(GATEWAYS)))
    assert sum(made for made, _ in found) == stores[0].count_live() == 12
    names = [row["name"] for row in stores[0].living()]
    assert len(names) == len(set(names))


def test_only_one_gateway_decides_an_approval(open_postgres: Open) -> None:
    stores = [Store(open_postgres()) for _ in range(GATEWAYS)]
    for round_ in range(10):
        stores[0].add_approval(approval(f"a{round_}"))
        together = threading.Barrier(GATEWAYS)

        def decide(store: Store, name: str = f"a{round_}", together: threading.Barrier = together) -> bool:
            together.wait()
            return store.move_approval(name, "pending", status="approved", decided_by="somebody")

        with ThreadPoolExecutor(GATEWAYS) as threads:
            assert sum(threads.map(decide, stores)) == 1


def test_gateways_that_start_at_once_make_the_tables_once(server: Postgres) -> None:
    words = server.database()
    together = threading.Barrier(GATEWAYS)

    def start(_: int) -> PostgresDatabase:
        together.wait()
        return PostgresDatabase(words)

    with ThreadPoolExecutor(GATEWAYS) as threads:
        opened = list(threads.map(start, range(GATEWAYS)))
    assert [one.row("SELECT count(*) AS n FROM atoll_schema") for one in opened] == [{"n": 1}] * GATEWAYS
    for one in opened:
        one.close()


def test_a_database_of_every_older_version_is_brought_up_to_date(
    server: Postgres, monkeypatch: pytest.MonkeyPatch
) -> None:
    for version in range(1, len(schema.POSTGRES)):
        words = server.database()
        monkeypatch.setattr(driver, "POSTGRES", schema.POSTGRES[:version])
        old = PostgresDatabase(words)
        old.change("INSERT INTO meta VALUES('from', ?)", str(version))
        old.close()
        monkeypatch.setattr(driver, "POSTGRES", schema.POSTGRES)
        store = Store(PostgresDatabase(words))
        store.add_sandbox(sandbox("a", request_id="r", request_hash="h"), [], 9)
        assert store.meta("from") == str(version) and store.requested_sandbox("me", "r") is not None
        store.close()


def test_a_server_that_is_away_is_an_error_to_try_again_and_then_goes_on(server: Postgres, open_postgres: Open) -> None:
    store = Store(open_postgres())
    store.add_sandbox(sandbox("a"), [], 9)
    server.stop()
    try:
        for _ in range(3):
            with pytest.raises(StoreFailed) as failed:
                store.sandbox("id-a")
            assert failed.value.retry == "yes" and not failed.value.damaged
        with pytest.raises(StoreFailed):
            store.set_meta("a", "1")
    finally:
        server.start()

    def is_back() -> bool:
        try:
            return store.sandbox("id-a") is not None
        except StoreFailed:
            return False

    until(is_back, "the store is back")
    store.set_meta("a", "1")
    assert store.meta("a") == "1"
    store.close()


def test_a_restart_of_the_server_between_two_reads_is_not_noticed(server: Postgres, open_postgres: Open) -> None:
    store = Store(open_postgres())
    store.add_sandbox(sandbox("a"), [], 9)
    server.stop()
    server.start()
    assert store.sandbox("id-a") is not None
    store.close()


def test_one_gateway_serves_and_the_next_takes_over_when_it_is_gone(server: Postgres) -> None:
    words, replaced = server.database(), threading.Event()
    first = PostgresDatabase(words, replaced.set)
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(PostgresDatabase, words, lambda: None)
        with pytest.raises(FutureTimeout):
            waiting.result(timeout=2 * driver.PAUSE)
        Store(first).set_meta("by", "first")
        # The first one's connection ends, as when its machine is cut off; it does not know yet.
        other = PostgresDatabase(words)
        kill = "SELECT count(pg_terminate_backend(pid)) AS n FROM pg_locks WHERE locktype = 'advisory' AND granted"
        assert other.row(f"{kill} AND pid != pg_backend_pid()") is not None
        second = waiting.result(timeout=PATIENCE)
        with pytest.raises(StoreFailed, match="another gateway"):
            Store(first).sandbox("a")
        assert replaced.is_set() and Store(second).meta("by") == "first"
        for one in (first, second, other):
            one.close()


def test_a_gateway_alone_gets_its_place_back_after_a_restart_of_the_server(server: Postgres) -> None:
    replaced = threading.Event()
    store = Store(PostgresDatabase(server.database(), replaced.set))
    server.stop()
    server.start()
    assert store.meta("a") is None and not replaced.is_set()
    store.close()
