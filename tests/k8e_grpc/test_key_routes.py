"""Keys over REST: made once, shown once, ended at once, and only by who may."""

import json
import secrets

import pytest

from atoll import errors
from atoll.client import calls
from atoll.client._sync.driver import Link
from atoll.client._sync.secure import RemoteLink


@pytest.fixture
def rest(gateway):
    link = Link(path=str(gateway.home / "daemon.sock"))
    yield link
    link.close()


def remote(gateway, key: str) -> RemoteLink:
    return RemoteLink(gateway.endpoint, api_key=key, ca_cert=str(gateway.home / "tls" / "sandbox-ca.crt"))


def test_from_make_to_revoke(gateway, rest) -> None:
    name = f"ci-{secrets.token_hex(4)}"
    made = rest.call(calls.post("/v1/keys", {"name": name, "ttl": "720h", "quotas": {"sandboxes": 1}}))
    assert made["e2b_key"] == "e2b_" + made["key"]
    assert (made["ttl_days"], made["scopes"], made["expires_at"] - made["created_at"]) == (30, ["use"], 30 * 86400)
    link = remote(gateway, made["e2b_key"])
    assert link.call(calls.list_sandboxes())["sandboxes"] == []
    listed = {key["name"]: key for key in rest.call(calls.get("/v1/keys"))["keys"]}
    assert listed[name]["expired"] is False
    assert made["key"] not in json.dumps(listed)
    with pytest.raises(errors.PermissionDenied):
        link.call(calls.post("/v1/keys", {"name": "mine", "scopes": ["admin"]}))
    with pytest.raises(errors.PermissionDenied):
        link.call(calls.get("/v1/keys"))
    assert rest.call(calls.post("/v1/keys/revoke", {"name": name}))["ok"]
    with pytest.raises(errors.Unauthenticated):
        link.call(calls.list_sandboxes())
    with pytest.raises(errors.NotFound):
        rest.call(calls.post("/v1/keys/revoke", {"name": name}))
    link.close()


def test_an_admins_key_may(gateway, rest) -> None:
    name = f"root-{secrets.token_hex(4)}"
    made = gateway.key(name, ttl_days=None, scopes=["admin"])
    assert made.key.expires_at is None
    link = remote(gateway, made.secret)
    assert name in {key["name"] for key in link.call(calls.get("/v1/keys"))["keys"]}
    more = link.call(calls.post("/v1/keys", {"name": f"{name}-2", "scopes": ["approve"]}))
    assert more["scopes"] == ["approve"], "an admin's key needs no terminal: it could approve by itself"
    link.close()


BAD = [
    {},
    {"name": "../x"},
    {"name": "a", "ttl": "soon"},
    {"name": "a", "scopes": ["god"]},
    {"name": "a", "scopes": []},
    {"name": "a", "more": 1},
    {"name": "a", "quotas": {"cpus": -1}},
]


@pytest.mark.parametrize("fields", BAD, ids=str)
def test_bad_keys(rest, fields) -> None:
    with pytest.raises(errors.InvalidArgument):
        rest.call(calls.post("/v1/keys", fields))


def test_import(gateway, rest) -> None:
    name, key = f"old-{secrets.token_hex(4)}", secrets.token_hex(32)
    assert rest.call(calls.post("/v1/keys/import", {"text": json.dumps({name: key})})) == {"keys": {name: "imported"}}
    link = remote(gateway, key)
    assert link.call(calls.list_sandboxes())["sandboxes"] == []
    link.close()
    with pytest.raises(errors.InvalidArgument):
        rest.call(calls.post("/v1/keys/import", {"text": "{"}))


def test_certificates(rest) -> None:
    assert isinstance(rest.call(calls.get("/v1/keys/certificates"))["certificates"], list)
    with pytest.raises(errors.NotFound):
        rest.call(calls.post("/v1/keys/certificates/revoke", {"fingerprint": "0" * 64}))
    with pytest.raises(errors.InvalidArgument):
        rest.call(calls.post("/v1/keys/certificates/revoke", {"fingerprint": "../x"}))


def test_no_key_is_ever_written_down(gateway, rest) -> None:
    """Canaries: used over every door, then looked for in everything the daemon keeps."""
    made = rest.call(calls.post("/v1/keys", {"name": f"canary-{secrets.token_hex(4)}"}))
    link = remote(gateway, made["key"])
    link.call(calls.list_sandboxes())
    link.close()
    for file in gateway.home.rglob("*"):
        if file.is_file() and file.stat().st_size < 50_000_000:
            assert made["key"].encode() not in file.read_bytes(), file
