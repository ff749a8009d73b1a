"""A sandbox's row in the store: how it begins, what it keeps of the box, and what a caller is shown of it."""

import hashlib
import json
import time
from typing import NamedTuple

import msgspec

from atoll import errors
from atoll.config import Sandboxes as Defaults
from atoll.core.access.principals import Principal, new_id
from atoll.core.sandboxes.provisioning import Plan
from atoll.core.sandboxes.state import Live, gone
from atoll.core.store.typed import SandboxRecord, SandboxRow
from atoll.model import CreateSandbox, End, HeldLimit, SandboxInfo, StoredPolicy


class Repeatable(NamedTuple):
    """The request id of a create, and a digest of what it asks for."""

    id: str
    hash: str


def new_row(
    who: Principal,
    plan: Plan,
    runtime: str,
    policy: StoredPolicy,
    defaults: Defaults,
    parent: str | None,
    request: Repeatable | None = None,
) -> SandboxRow:
    now, spec, image = time.time(), plan.spec, plan.image
    named = spec.name is not None
    lasting = named or (spec.persistent and not spec.keep)
    lifetime = spec.lifetime_s or (None if lasting else defaults.lifetime_s or None)
    idle = spec.idle_timeout_s or (None if named and not spec.keep else defaults.idle_timeout_s or None)
    return {
        "id": new_id(),
        "owner": who.owner,
        "name": spec.name,
        "state": "creating",
        "runtime": runtime,
        "image": image.name,
        "spec": msgspec.to_builtins(spec),
        "record": {"limits": {k: {"value": v, "enforced": None} for k, v in plan.limits.to_json().items()},
                   "policy": policy, "uid": who.uid, "gid": who.gid, "image": image.digest},
        "created_at": now,
        "expires_at": None if lifetime is None else now + lifetime,
        "idle_timeout": idle,
        "last_active": now,
        "parent_id": parent,
        "ended_at": None, "end_kind": None, "end_detail": None, "end_by": None,
        "request_id": None if request is None else request.id,
        "request_hash": None if request is None else request.hash,
    }  # fmt: skip


def hash_request(spec: CreateSandbox) -> str:
    """Return a digest of what a create asks for, without its request id."""
    asked = msgspec.to_builtins(msgspec.structs.replace(spec, request_id=None))
    return hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()


def with_box(record: SandboxRecord, live: Live) -> SandboxRecord:
    """The record with its box, and which limits this host really holds."""
    held = live.box.facts.enforced
    limits: dict[str, HeldLimit] = {
        k: {"value": v["value"], "enforced": held.get(k, False)} for k, v in record["limits"].items()
    }
    return {**record, "box": live.box.record, "limits": limits}


def starts_when_used(row: SandboxRow) -> bool:
    """Return whether it was stopped only because nobody used it or it was lost, and starts again by itself."""
    return (
        row["state"] == "stopped"
        and row["end_kind"] not in (None, "stopped")
        and (bool(row["spec"].get("keep")) or row["end_kind"] == "idle")
    )


def unsuited(row: SandboxRow) -> errors.AtollError:
    """Why a sandbox that is not alive cannot do what was asked."""
    if row["state"] in ("ended", "ending"):
        return gone(row["id"], row["end_kind"] or "lost", row["end_detail"] or "", row["end_by"] or "")
    hint = f"start it first: atoll start {row['name'] or row['id']}" if row["state"] == "stopped" else ""
    return errors.FailedPrecondition(f"the sandbox is {row['state']}", hint=hint)


def info(row: SandboxRow, live: Live | None) -> SandboxInfo:
    end = None
    if row["state"] == "ended" or (row["end_kind"] and row["state"] in ("stopped", "ending")):
        at = row["ended_at"] or row["last_active"]
        end = End(kind=row["end_kind"] or "lost", detail=row["end_detail"] or "", by=row["end_by"] or "", at=at)
    spec, policy = row["spec"], row["record"].get("policy", {})
    return SandboxInfo(
        id=row["id"],
        name=row["name"],
        owner=row["owner"],
        state=row["state"],
        runtime=row["runtime"],
        image=row["image"],
        created_at=row["created_at"],
        expires_at=row["expires_at"],
        idle_timeout_s=row["idle_timeout"],
        last_active=live.last_active if live else row["last_active"],
        limits=row["record"].get("limits", {}),
        policy=policy,
        hosts=policy.get("hosts", spec.get("hosts")),
        env_keys=sorted(spec.get("env", {})),
        background_runs=live.background_runs if live else 0,
        labels=spec.get("labels", {}),
        workdir=spec.get("workdir", "/workspace"),
        pid=live.box.facts.shown.get("pid") if live else None,
        end=end,
        parent_id=row["parent_id"],
        secret_env_vars=sorted(secret["env"] for secret in spec.get("secrets", [])),
        require_approval=spec.get("require_approval", []),
    )
