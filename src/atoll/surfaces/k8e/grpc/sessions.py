"""Sessions: create, look at, end, pause and resume them, and change what they may reach."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from atoll.core import Core
from atoll.core.access.principals import Principal
from atoll.errors import FailedPrecondition, InvalidArgument, NotFound, SandboxGone
from atoll.model import CreateSandbox, LimitsSpec, ObtainSession, SandboxInfo, SessionInfo, convert
from atoll.proto.sandbox.v1 import sandbox_pb2 as pb
from atoll.words import k8e as words
from atoll.words import k8e_ids as ids
from atoll.words.k8e import (
    MAX_ENV,
    MAX_ENV_KEY,
    MAX_ENV_SUM,
    MAX_ENV_VALUE,
    MAX_SECRETS,
    PHASES,
)

from .calls import TENANT
from .text import clean


class Sessions:
    core: Core

    async def CreateSession(self, who: Principal, request: Any) -> Any:
        """Make a session; with `obtain`, find the tenant's own first."""
        tenant = ids.tenant(request.tenant_id or TENANT.get())
        spec = _asked(request, tenant)
        if not request.obtain:
            found = SessionInfo(sandbox=await self.core.sandboxes.create(who, spec), created=True)
        else:
            before = ids.session_ref(request.before) if request.before else None
            wanted = ObtainSession(tenant=tenant, before=before, sandbox=spec)
            found = await self.core.sessions.obtain(who, wanted)
        info, old = found.sandbox, found.replaced
        replaced = pb.SessionReplaced(session_id=request.before, reason=old.reason, lost=old.lost) if old else None
        return pb.CreateSessionResponse(
            session_id=ids.session_id(info), runtime_class=info.runtime, image=clean(info.image),
            created=found.created, replaced=replaced,
        )  # fmt: skip

    async def GetSession(self, who: Principal, request: Any) -> Any:
        info = await self.core.sandboxes.get(who, ids.session_ref(request.session_id))
        if info.state == "ended":
            why = info.end.kind if info.end else "lost"
            raise SandboxGone(f"session not found: it has ended ({why})", details={"reason": why})
        return _shown(info)

    async def ListSessions(self, who: Principal, request: Any) -> Any:
        wanted = request.phase or "Active"
        shown = [_shown(info) for info in await self.core.sandboxes.list(who)]
        kept = [one for one in shown if wanted == "all" or one.phase == wanted]
        return pb.ListSessionsResponse(sessions=kept)

    async def DestroySession(self, who: Principal, request: Any) -> Any:
        ref = ids.session_ref(request.session_id)
        info = await self.core.sandboxes.get(who, ref)
        if info.state == "ended":
            raise NotFound(f"session {request.session_id!r:.120} not found")
        await self.core.sandboxes.destroy(who, info.id)
        return pb.DestroySessionResponse(ok=True)

    async def PauseSession(self, who: Principal, request: Any) -> Any:
        await self._needs(who, request.session_id, "running")
        await self.core.sandboxes.stop(who, ids.session_ref(request.session_id))
        return pb.PauseSessionResponse(ok=True)

    async def ResumeSession(self, who: Principal, request: Any) -> Any:
        await self._needs(who, request.session_id, "stopped")
        await self.core.sandboxes.start(who, ids.session_ref(request.session_id))
        return pb.ResumeSessionResponse(ok=True)

    async def _needs(self, who: Principal, session: str, state: str) -> None:
        info = await self.core.sandboxes.get(who, ids.session_ref(session))
        if info.state in ("running", "paused", "stopped") and info.state != state:
            raise FailedPrecondition(f"the session is {PHASES[info.state]}, not {PHASES[state]}")


def _asked(request: Any, tenant: str) -> CreateSandbox:
    check_env(request.env)
    check_secrets(request.secret_refs, request.env)
    labels = words.tenant_labels(tenant)
    fields: dict[str, object] = {
        "runtime": request.runtime_class or "auto",
        "env": dict(request.env),
        "hosts": list(request.allowed_hosts) or None,
        "network": not request.no_network,
        "persistent": request.persistent,
        "keep": bool(tenant) and not request.persistent,
        "labels": labels,
        "limits": _limits(request),
        "secrets": [_reference(ref) for ref in request.secret_refs],
        "require_approval": list(request.require_approval),
    }
    if request.session_id:
        fields["alias"] = labels[words.SESSION_LABEL] = request.session_id
    for name in ("image", "profile", "mode", "name", "lifetime_s", "idle_timeout_s", "request_id"):
        if getattr(request, name):
            fields[name] = getattr(request, name)
    return convert(CreateSandbox, fields)


def _limits(request: Any) -> Mapping[str, float]:
    """Return the limits that the request names: every field of the model that the message has."""
    known = request.DESCRIPTOR.fields_by_name
    asked = {name: getattr(request, name) for name in LimitsSpec.__struct_fields__ if name in known}
    return {name: value for name, value in asked.items() if value}


def _reference(ref: Any) -> dict[str, str]:
    return {"name": ref.secret_name, "key": ref.key, "env": ref.env_var}


def check_env(env: Any) -> None:
    """K8E's bounds on an environment."""
    if len(env) > MAX_ENV:
        raise InvalidArgument(f"at most {MAX_ENV} environment variables")
    for key, value in env.items():
        if not key or "=" in key or "\0" in key or len(key.encode()) > MAX_ENV_KEY:
            raise InvalidArgument(f"environment variable {key!r:.80} is not valid")
        if "\0" in value or len(value.encode()) > MAX_ENV_VALUE:
            raise InvalidArgument(f"the value of {key!r:.80} has NUL or more than {MAX_ENV_VALUE} bytes")
    if sum(len(key.encode()) + len(value.encode()) for key, value in env.items()) > MAX_ENV_SUM:
        raise InvalidArgument(f"the environment is larger than {MAX_ENV_SUM} bytes")


def check_secrets(refs: Any, env: Any) -> None:
    if len(refs) > MAX_SECRETS:
        raise InvalidArgument(f"at most {MAX_SECRETS} secrets")
    seen = set()
    for ref in refs:
        if not (ref.secret_name and ref.key and ref.env_var):
            raise InvalidArgument("a secret needs secret_name, key and env_var")
        if ref.env_var in seen:
            raise InvalidArgument(f"environment variable {ref.env_var!r:.80} is named by two secrets")
        seen.add(ref.env_var)
    check_env(dict.fromkeys(seen, ""))


def _shown(info: SandboxInfo) -> Any:
    hosts = info.policy.get("hosts") if isinstance(info.policy.get("hosts"), list) else info.hosts
    return pb.GetSessionResponse(
        session_id=ids.session_id(info),
        phase=words.phase_of(info.state),
        runtime_class=info.runtime,
        tenant_id=words.tenant_of(info.labels),
        expires_at=int(info.expires_at or 0),
        env_keys=[clean(key) for key in info.env_keys],
        secret_env_vars=[clean(key) for key in info.secret_env_vars],
        background_runs=info.background_runs,
        allowed_hosts=[clean(host) for host in hosts or []],
        image=clean(info.image),
        end_reason=info.end.kind if info.end else "",
        policy_json=json.dumps(info.policy, default=str),
        created_at=int(info.created_at),
        name=clean(info.name or ""),
    )
