"""`AsyncSandboxClient` and `async_sandbox_session`: the same SDK for asyncio (see `k8e.py` for what each call does)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager, suppress
from types import TracebackType
from typing import Any

import grpc

from atoll.client.route import find_route
from atoll.errors import AtollError, FileNotFound, NotFound
from atoll.proto.sandbox.v1 import sandbox_pb2 as pb
from atoll.proto.sandbox.v1 import sandbox_pb2_grpc
from atoll.surfaces.k8e.grpc.status import error_of

from .. import wire as wire
from ..channel import metadata, open_async_channel, ready
from ..wire import Approval, ExecResult, FileEntry, Session


class AsyncSandboxClient:
    """As `SandboxClient`, for one event loop. Use it as an async context manager, or `await close()`."""

    def __init__(
        self,
        endpoint: str | None = None,
        tenant_id: str = "",
        *,
        api_key: str | None = None,
        ca_cert: str | None = None,
        runtime_class: str = "",
        allowed_hosts: Iterable[str] | None = None,
    ) -> None:
        self._route = find_route(endpoint, api_key, ca_cert)
        self._tenant = tenant_id
        self._default = (runtime_class, allowed_hosts)
        self._session = ""
        self._lock = asyncio.Lock()
        self._channel: Any = None
        self._stub: Any = None

    @property
    def endpoint(self) -> str:
        return self._route.endpoint

    async def run(self, code: str, language: str = "bash", timeout: float = 30) -> ExecResult:
        request = wire.run_request("", code, language, timeout)
        for last in (False, True):
            request.session_id = await self.default_session()
            try:
                return await self._exec(request, timeout)
            except NotFound as gone:
                if last or isinstance(gone, FileNotFound):
                    raise
                self._forget(request.session_id)
        raise AssertionError("unreachable")

    async def exec(self, session_id: str, command: str, timeout: float = 30, workdir: str = "") -> ExecResult:
        return await self._exec(wire.command_request(session_id, command, timeout, workdir=workdir), timeout)

    async def exec_stream(self, session_id: str, command: str, timeout: float = 300) -> AsyncIterator[str]:
        request = wire.command_request(session_id, command, timeout)
        stub = await self._connected()
        call = stub.ExecStream(request, timeout=timeout + wire.SLACK_SECONDS, metadata=metadata(self._route))
        try:
            async for message in call:
                if message.chunk:
                    yield message.chunk
        except grpc.RpcError as failure:
            raise error_of(failure, acted=True) from None
        finally:
            call.cancel()

    async def exec_background(self, session_id: str, command: str, timeout: float = 0) -> str:
        request = wire.command_request(session_id, command, timeout, background=True)
        run_id: str = (await self._call("Exec", request, acts=True)).run_id
        return run_id

    async def poll_run(self, run_id: str) -> ExecResult:
        return wire.exec_result(await self._call("PollRun", pb.PollRunRequest(run_id=run_id)))

    async def pip_install(self, session_id: str, packages: Iterable[str]) -> ExecResult:
        request = pb.PipInstallRequest(session_id=session_id, packages=wire.strings(packages))
        return wire.pip_result(await self._call("PipInstall", request, acts=True))

    async def create_session(
        self,
        runtime_class: str = "",
        allowed_hosts: Iterable[str] | None = None,
        tenant_id: str = "",
        *,
        session_id: str = "",
        env: Mapping[str, str] | None = None,
        **options: Any,
    ) -> str:
        request = wire.create_request(runtime_class, allowed_hosts, tenant_id or self._tenant, session_id, env, options)
        answer = await self._call("CreateSession", request, acts=True, timeout=wire.CREATE_SECONDS)
        made: str = answer.session_id
        return made

    async def destroy_session(self, session_id: str) -> bool:
        ok: bool = (await self._call("DestroySession", pb.DestroySessionRequest(session_id=session_id))).ok
        self._forget(session_id)
        return ok

    async def get_session(self, session_id: str) -> Session:
        return wire.session(await self._call("GetSession", pb.GetSessionRequest(session_id=session_id)))

    async def list_sessions(self, phase: str = "") -> list[Session]:
        answer = await self._call("ListSessions", pb.ListSessionsRequest(phase=phase))
        return [wire.session(one) for one in answer.sessions]

    async def pause_session(self, session_id: str) -> bool:
        return bool((await self._call("PauseSession", pb.PauseSessionRequest(session_id=session_id), acts=True)).ok)

    async def resume_session(self, session_id: str) -> bool:
        return bool((await self._call("ResumeSession", pb.ResumeSessionRequest(session_id=session_id), acts=True)).ok)

    async def run_subagent(self, parent_session_id: str) -> str:
        request = pb.RunSubAgentRequest(parent_session_id=parent_session_id)
        answer = await self._call("RunSubAgent", request, acts=True, timeout=wire.CREATE_SECONDS)
        made: str = answer.session_id
        return made

    async def update_allowed_hosts(self, session_id: str, hosts: Iterable[str]) -> list[str]:
        request = pb.UpdateAllowedHostsRequest(session_id=session_id, hosts=wire.strings(hosts))
        return list((await self._call("UpdateAllowedHosts", request)).hosts)

    async def write_file(self, session_id: str, path: str, content: str | bytes, mode: str = "w") -> bool:
        request = wire.write_request(session_id, path, content, mode)
        return bool((await self._call("WriteFile", request, acts=mode == "a")).ok)

    async def read_file(self, session_id: str, path: str) -> str:
        return wire.file_text(await self._call("ReadFile", pb.ReadFileRequest(session_id=session_id, path=path)))

    async def read_file_bytes(self, session_id: str, path: str) -> bytes:
        return wire.file_bytes(await self._call("ReadFile", pb.ReadFileRequest(session_id=session_id, path=path)))

    async def list_files(self, session_id: str, since: int = 0) -> list[FileEntry]:
        return wire.files(await self._call("ListFiles", pb.ListFilesRequest(session_id=session_id, since=since)))

    async def confirm_action(self, session_id: str = "", action: str = "", approval_id: str = "") -> Approval:
        request = pb.ConfirmActionRequest(session_id=session_id, action=action, approval_id=approval_id)
        return wire.approval(await self._call("ConfirmAction", request, timeout=wire.CONFIRM_SECONDS))

    async def approve_action(self, approval_id: str, approved: bool = True, reason: str = "") -> bool:
        request = pb.ApproveActionRequest(approval_id=approval_id, approved=approved, reason=reason)
        return bool((await self._call("ApproveAction", request, acts=True)).ok)

    async def default_session(self) -> str:
        async with self._lock:
            if not self._session:
                runtime, hosts = self._default
                self._session = await self._tenants_session() or await self.create_session(runtime, hosts)
            return self._session

    async def _tenants_session(self) -> str:
        if not self._tenant:
            return ""
        mine = [one for one in await self.list_sessions("all") if one.tenant_id == self._tenant]
        return wire.pick_session(mine)

    def _forget(self, session_id: str) -> None:
        if self._session == session_id:
            self._session = ""

    async def close(self) -> None:
        session, self._session = self._session, ""
        if session and not self._tenant:
            with suppress(AtollError):
                await self.destroy_session(session)
        if self._channel is not None:
            await self._channel.close(None)

    async def __aenter__(self) -> AsyncSandboxClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def _connected(self) -> Any:
        if self._stub is None:
            self._route = await asyncio.to_thread(ready, self._route)
        if self._stub is None:
            self._channel = open_async_channel(self._route)
            self._stub = sandbox_pb2_grpc.SandboxServiceStub(self._channel)
        return self._stub

    async def _exec(self, request: Any, timeout: float) -> ExecResult:
        return wire.exec_result(await self._call("Exec", request, acts=True, timeout=timeout + wire.SLACK_SECONDS))

    async def _call(self, name: str, request: Any, *, acts: bool = False, timeout: float = wire.CALL_SECONDS) -> Any:
        stub = await self._connected()
        try:
            return await getattr(stub, name)(request, timeout=timeout, metadata=metadata(self._route))
        except grpc.RpcError as failure:
            raise error_of(failure, acted=acts) from None


@asynccontextmanager
async def async_sandbox_session(
    runtime_class: str = "", allowed_hosts: Iterable[str] | None = None, endpoint: str | None = None, **options: Any
) -> AsyncIterator[tuple[AsyncSandboxClient, str]]:
    """A client and a session of its own, which ends with the block."""
    async with AsyncSandboxClient(endpoint, **options) as client:
        session = await client.create_session(runtime_class, allowed_hosts)
        try:
            yield client, session
        finally:
            with suppress(NotFound):
                await client.destroy_session(session)
