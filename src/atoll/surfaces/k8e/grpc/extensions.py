"""Sub-agents, approvals, snapshots, exposed ports and live host lists."""

from __future__ import annotations

import re
from typing import Any

from atoll.core import Core
from atoll.core.access.principals import Principal
from atoll.errors import InvalidArgument
from atoll.model import ChangeHosts, SubAgent, convert
from atoll.proto.sandbox.v1 import sandbox_pb2 as pb
from atoll.words import k8e_ids as ids

from .sessions import check_env
from .text import clean

_SNAPSHOT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
MAX_ACTION = 4096


class Extensions:
    core: Core

    # Sub-agents and hosts

    async def RunSubAgent(self, who: Principal, request: Any) -> Any:
        ref = ids.session_ref(request.parent_session_id, "parent_session_id")
        check_env(request.env)
        info = await self.core.subagents.create(who, ref, convert(SubAgent, {"env": dict(request.env)}))
        return pb.RunSubAgentResponse(session_id=ids.session_id(info))

    async def UpdateAllowedHosts(self, who: Principal, request: Any) -> Any:
        """Replaces the list of a running session; an empty one is the default list again."""
        ref = ids.session_ref(request.session_id)
        change = convert(ChangeHosts, {"hosts": list(request.hosts) or None})
        now = await self.core.hosts.change(who, ref, change)
        return pb.UpdateAllowedHostsResponse(hosts=[clean(host) for host in now.hosts])

    # Approvals

    async def ConfirmAction(self, who: Principal, request: Any) -> Any:
        """Without an approval id: ask, and answer at once with one. With it: wait for the decision."""
        if request.approval_id:
            return _decision(await self.core.approvals.wait(who, request.approval_id))
        ref = ids.session_ref(request.session_id)
        if not request.action.strip() or len(request.action) > MAX_ACTION or "\0" in request.action:
            raise InvalidArgument(f"action must be 1 to {MAX_ACTION} characters")
        return _decision(await self.core.approvals.request(who, ref, request.action))

    async def ApproveAction(self, who: Principal, request: Any) -> Any:
        if not request.approval_id:
            raise InvalidArgument("approval_id is required")
        await self.core.approvals.decide(who, request.approval_id, request.approved, request.reason)
        return pb.ApproveActionResponse(ok=True)

    # Snapshots: K8E's registry of manifests

    async def SnapshotPut(self, who: Principal, request: Any) -> Any:
        name, layers = _snapshot_name(request.name), list(request.layers)
        await self.core.snapshots.put_manifest(who, name, layers)
        return pb.SnapshotPutResponse(name=name, layers=len(layers))

    async def SnapshotGet(self, who: Principal, request: Any) -> Any:
        name = _snapshot_name(request.name)
        return pb.SnapshotGetResponse(name=name, layers=await self.core.snapshots.get_manifest(who, name))

    async def SnapshotList(self, who: Principal, request: Any) -> Any:
        return pb.SnapshotListResponse(names=await self.core.snapshots.manifest_names(who))

    # Ports

    async def ExposeService(self, who: Principal, request: Any) -> Any:
        ref, port = ids.session_ref(request.session_id), _port(request.port)
        found = await self.core.exposures.expose(who, ref, port, request.host or "127.0.0.1")
        return pb.ExposeServiceResponse(url=found.url)

    async def UnexposeService(self, who: Principal, request: Any) -> Any:
        ref, port = ids.session_ref(request.session_id), _port(request.port)
        return pb.UnexposeServiceResponse(ok=bool(await self.core.exposures.unexpose(who, ref, port)))

    async def ListExposed(self, who: Principal, request: Any) -> Any:
        ref = ids.session_ref(request.session_id)
        return pb.ListExposedResponse(
            services=[
                pb.ExposedService(port=one.port, url=one.url, host=one.host, started_at=int(one.started_at))
                for one in await self.core.exposures.list(who, ref)
            ]
        )


def _decision(found: Any) -> Any:
    return pb.ConfirmActionResponse(
        approval_id=found.id,
        approved=found.status == "approved",
        reason=clean(found.reason or ""),
        status=found.status,
    )


def _snapshot_name(name: str) -> str:
    if not _SNAPSHOT.fullmatch(name) or ".." in name:
        raise InvalidArgument(
            f"snapshot name {name!r:.80} is not valid", hint="letters, digits, `.`, `_`, `-`, at most 63"
        )
    return name


def _port(port: int) -> int:
    if not 1 <= port <= 65535:
        raise InvalidArgument("port must be a number from 1 to 65535")
    return port
