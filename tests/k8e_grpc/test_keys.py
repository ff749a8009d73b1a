"""API keys: hashed at rest, expiry, revocation, scopes, quotas, import of K8E's file."""

import json
import secrets
import sqlite3
import threading
from pathlib import Path

import pytest

from atoll.core.access.keys import Keys, parse_ttl
from atoll.errors import AlreadyExists, InvalidArgument, NotFound, Unauthenticated


class Clock:
    def __init__(self) -> None:
        self.now = 1_800_000_000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def keys(tmp_path: Path, clock: Clock):
    made = Keys(tmp_path / "atoll.db", clock=clock)
    yield made
    made.close()


def test_no_keys_means_no_access(keys: Keys) -> None:
    for bearer in ("", "0" * 64, "e2b_" + "0" * 64):
        with pytest.raises(Unauthenticated):
            keys.authenticate(bearer)


def test_a_key_opens_in_both_forms(keys: Keys) -> None:
    made = keys.create("ci", scopes=["use", "approve"], quotas={"sandboxes": 3, "cpus": 2.5})
    assert len(made.secret) == 64
    assert made.secret not in repr(made)
    for bearer in (made.secret, made.e2b):
        key = keys.authenticate(bearer)
        assert (key.name, key.scopes, dict(key.quotas)) == ("ci", ("use", "approve"), {"sandboxes": 3, "cpus": 2.5})
        assert key.may("approve")
        assert not key.may("admin")


def test_an_approver_key_cannot_use_and_an_admin_may_all(keys: Keys) -> None:
    assert not keys.create("boss", scopes=["approve"]).key.may("use")
    admin = keys.create("root", scopes=["admin"]).key
    assert admin.may("use") and admin.may("approve") and admin.may("admin")


def test_every_refusal_reads_the_same(keys: Keys, clock: Clock) -> None:
    made = keys.create("old", ttl_days=1)
    gone = keys.create("gone")
    keys.revoke("gone")
    clock.now += 86400
    wrong = ["", " ", made.secret, gone.secret, "x" * 64, made.secret.upper(), made.secret + "0", "e2b_e2b_" + made.secret,
             "\0", "日本", "\udcff", "' OR 1=1 --", "A" * 100_000]  # fmt: skip
    texts = set()
    for bearer in wrong:
        with pytest.raises(Unauthenticated) as caught:
            keys.authenticate(bearer)
        texts.add(str(caught.value))
    assert len(texts) == 1


def test_the_secret_is_nowhere_on_disk(keys: Keys, tmp_path: Path) -> None:
    made = keys.create("ci")
    keys.close()
    for file in tmp_path.iterdir():
        assert made.secret.encode() not in file.read_bytes()
        assert bytes.fromhex(made.secret) not in file.read_bytes()


def test_expiry_to_the_second(keys: Keys, clock: Clock) -> None:
    made = keys.create("ci", ttl_days=2)
    clock.now += 2 * 86400 - 1
    assert keys.authenticate(made.secret).name == "ci"
    clock.now += 1
    with pytest.raises(Unauthenticated):
        keys.authenticate(made.secret)
    with pytest.raises(Unauthenticated):
        keys.current(made.key.id)
    assert keys.get("ci").expired(clock.now)


def test_clock_skew_revives_no_revoked_key_and_kills_no_good_one(keys: Keys, clock: Clock) -> None:
    """The machine's clock is set back behind the making of a key, and far ahead, and right again."""
    good, ended = keys.create("good", ttl_days=30), keys.create("ended", ttl_days=30)
    keys.revoke("ended")
    for step in (-86400.0 * 400, 86400.0 * 401, -86400.0):
        clock.now += step
        assert keys.authenticate(good.secret).name == "good"
        with pytest.raises(Unauthenticated):
            keys.authenticate(ended.secret)
    clock.now += 86400.0 * 31
    with pytest.raises(Unauthenticated):
        keys.authenticate(good.secret)


def test_revocation_counts_at_once_in_every_process_and_after_restart(keys: Keys, tmp_path: Path, clock: Clock) -> None:
    made = keys.create("ci")
    other = Keys(tmp_path / "atoll.db", clock=clock)
    assert other.authenticate(made.secret)
    keys.revoke("ci")
    with pytest.raises(Unauthenticated):
        other.authenticate(made.secret)
    other.close()
    again = Keys(tmp_path / "atoll.db", clock=clock)
    with pytest.raises(Unauthenticated):
        again.authenticate(made.secret)
    again.close()
    with pytest.raises(NotFound):
        keys.revoke("ci")


def test_a_name_is_free_again_after_revocation_but_the_old_key_stays_dead(keys: Keys) -> None:
    old = keys.create("ci")
    with pytest.raises(AlreadyExists):
        keys.create("ci")
    keys.revoke("ci")
    new = keys.create("ci")
    assert keys.authenticate(new.secret).id == new.key.id
    with pytest.raises(Unauthenticated):
        keys.authenticate(old.secret)
    with pytest.raises(Unauthenticated):
        keys.current(old.key.id)
    assert [key.id for key in keys.list()] == [new.key.id]
    assert len(keys.list(revoked=True)) == 2


@pytest.mark.parametrize("name", ["", ".", "..", "../x", "a/b", "a b", "-a", "a" * 64, "a\0", "é", "a\n"])
def test_hostile_names(keys: Keys, name: str) -> None:
    with pytest.raises(InvalidArgument):
        keys.create(name)


@pytest.mark.parametrize(
    "options",
    [{"scopes": []}, {"scopes": ["root"]}, {"quotas": {"moon": 1}}, {"quotas": {"cpus": -1}}, {"quotas": {"cpus": True}},
     {"quotas": {"cpus": float("nan")}}, {"ttl_days": 0}, {"ttl_days": -1}, {"ttl_days": 10**9}],
)  # fmt: skip
def test_bad_options(keys: Keys, options: dict) -> None:
    with pytest.raises(InvalidArgument):
        keys.create("ci", **options)
    assert keys.list() == []


def test_ttl_forms() -> None:
    forms = {"30d": 30, "720h": 30, "25h": 2, "1h": 1, "7": 7, "never": None, "none": None, "0": None, "NEVER": None}
    assert {text: parse_ttl(text) for text in forms} == forms
    for bad in ("", "d", "-1", "1.5d", "1w", "0d", "0h", "99999999", "１d"):
        with pytest.raises(InvalidArgument):
            parse_ttl(bad)


def test_import_of_k8e_keys(keys: Keys, clock: Clock) -> None:
    a, b, c = (secrets.token_hex(32) for _ in range(3))
    new = {"version": 2, "keys": {"a": {"key": a, "created_at": "2026-01-02T03:04:05Z", "expires_at": "2126-01-01T00:00:00Z"},
                                  "b": {"key": b, "created_at": "2020-01-01T00:00:00Z", "ttl_days": 30}}}  # fmt: skip
    assert keys.import_k8e(json.dumps(new)) == {"a": "imported", "b": "imported"}
    assert keys.import_k8e(json.dumps({"c": c, "a": secrets.token_hex(32)})) == {"c": "imported", "a": "name taken"}
    assert keys.import_k8e(json.dumps(new)) == {"a": "present", "b": "present"}
    assert keys.authenticate(a).name == "a"
    assert keys.authenticate(c).expires_at is None
    with pytest.raises(Unauthenticated):
        keys.authenticate(b)
    keys.revoke("a")
    assert keys.import_k8e(json.dumps(new))["a"] == "revoked"
    with pytest.raises(Unauthenticated):
        keys.authenticate(a)


@pytest.mark.parametrize(
    "text", ["", "[]", "{", '"x"', '{"a": 1}', '{"a": "short"}', '{"version": 2}', '{"version":2,"keys":{"a":{}}}']
)
def test_bad_imports(keys: Keys, text: str) -> None:
    with pytest.raises(InvalidArgument):
        keys.import_k8e(text)


def test_threads_may_share_it(keys: Keys) -> None:
    made = keys.create("ci")
    failures: list[Exception] = []

    def work(number: int) -> None:
        try:
            keys.create(f"k{number}")
            for _ in range(50):
                keys.authenticate(made.secret)
        except (sqlite3.Error, Unauthenticated) as failure:
            failures.append(failure)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert failures == []
    assert len(keys.list()) == 9
