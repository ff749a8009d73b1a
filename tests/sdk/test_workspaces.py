"""Snapshots, sub-agents and approvals through both faces."""

import secrets
from typing import Any

import pytest

from atoll.errors import AlreadyExists, FailedPrecondition, NotFound, PermissionDenied


def test_a_snapshot_is_saved_listed_restored_and_deleted(face: Any, sandbox: Any) -> None:
    name = f"sdk-{secrets.token_hex(4)}"
    sandbox.files.write("/workspace/kept", b"\0\xff")
    assert sandbox.snapshot(name)["file_count"] >= 1
    with pytest.raises(AlreadyExists):
        sandbox.snapshot(name)
    assert sandbox.snapshot(name, force=True)["stored_bytes"] == 0
    assert name in [one["name"] for one in face.snapshots()]
    with face.restore(name, memory_mb=256) as other:
        assert other.id != sandbox.id
        assert other.files.read("/workspace/kept") == b"\0\xff"
    face.delete_snapshot(name)
    with pytest.raises(NotFound):
        face.restore(name)


def test_a_subagent_shares_the_workspace(sandbox: Any) -> None:
    with sandbox.subagent(memory_mb=128) as helper:
        helper.files.write("/workspace/from-helper", b"hello")
        assert sandbox.files.read("/workspace/from-helper") == b"hello"
        with pytest.raises(PermissionDenied):
            helper.subagent()
    assert sandbox.exec("true").ok, "the parent lives on"


def test_a_confirmation_nobody_gives_is_none(sandbox: Any) -> None:
    assert sandbox.confirm("wipe the disk", timeout=0.2) is False


def test_a_secret_that_does_not_exist_is_refused(face: Any) -> None:
    with pytest.raises(FailedPrecondition):
        face.create(secrets=[{"env": "A", "name": "none", "key": "k"}])
