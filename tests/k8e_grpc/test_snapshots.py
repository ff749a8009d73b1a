"""The registry of snapshot manifests: names are checked, content is one's own."""

import secrets

import pytest

from atoll.client import calls
from atoll.client._sync.driver import Link

from .test_rpcs import code

HOSTILE = ["", ".", "..", "../..", "a/b", "a\0", "x" * 300, "-x", "a b", "日本", "a..b"]


@pytest.fixture
def saved(gateway, local, session):
    name = f"snap-{secrets.token_hex(4)}"
    local.WriteFile(session_id=session, path="/workspace/a", content="content " * 1000)
    rest = Link(path=str(gateway.home / "daemon.sock"))
    rest.call(calls.post(calls.sandbox_path(session.removeprefix("sess-"), "snapshots"), {"name": name}))
    yield name
    rest.call(calls.Call("DELETE", f"/v1/snapshots/{name}"))
    rest.close()


def test_k8e_P16_the_manifest_of_a_saved_snapshot(local, saved) -> None:
    assert saved in local.SnapshotList().names
    layers = local.SnapshotGet(name=saved).layers
    assert layers and all(len(layer) == 64 for layer in layers)
    put = local.SnapshotPut(name=f"{saved}-again", layers=layers)
    assert (put.name, put.layers) == (f"{saved}-again", len(layers))
    assert list(local.SnapshotGet(name=f"{saved}-again").layers) == list(layers)


def test_anothers_snapshot_is_none(gateway, local, saved) -> None:
    other = gateway.stub(gateway.key(f"snap-{secrets.token_hex(4)}").secret)
    layers = list(local.SnapshotGet(name=saved).layers)
    assert saved not in other.SnapshotList().names
    assert code(other.SnapshotGet, name=saved) == code(other.SnapshotGet, name="no-such") == "NOT_FOUND"
    other.SnapshotPut(name="stolen", layers=layers)  # a list that it wrote down itself, and no content
    assert list(other.SnapshotGet(name="stolen").layers) == layers


@pytest.mark.parametrize("name", HOSTILE)
def test_k8e_D23_hostile_names(local, name) -> None:
    assert code(local.SnapshotGet, name=name) == "INVALID_ARGUMENT"
    assert code(local.SnapshotPut, name=name, layers=["0" * 64]) == "INVALID_ARGUMENT"
    if name:
        assert code(local.CreateSession, tenant_id=name) == "INVALID_ARGUMENT"


@pytest.mark.parametrize("layers", [[], ["x"], ["0" * 63], ["G" * 64], ["../" * 21 + "x"]], ids=str)
def test_bad_layers(local, layers) -> None:
    assert code(local.SnapshotPut, name="fine", layers=layers) == "INVALID_ARGUMENT"
