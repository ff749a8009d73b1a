"""`AsyncSandboxClient` and `async_sandbox_session`: K8E's Python SDK for asyncio programs, over gRPC.

    async with AsyncSandboxClient() as client:
        print((await client.run("print('hello')", language="python")).stdout)

Errors are those of `atoll.errors`. No command is ever run twice. A session that is provably gone is replaced by a new one,
and the result says so (`session_replaced`). A create whose answer was lost is asked for again.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager, suppress
from types import TracebackType
from typing import Any

import grpc

from atoll.client.route import find_route
from atoll.errors import AtollError, FileNotFound, NotFound, OutcomeUnknown
from atoll.proto.sandbox.v1 import sandbox_pb2 as pb
from atoll.surfaces.k8e.grpc.status import error_of

from .. import wire
from ..channel import metadata
from ..wire import Approval, ExecResult, FileEntry, Replaced, Session
from .transport import Lock, Transport


class AsyncSandboxClient:
    """A connection to a gateway, with a default session that is made when it is first needed.

    Without arguments it is the local daemon. `endpoint` and `api_key` fall back to K8E_SANDBOX_ENDPOINT and
    K8E_SANDBOX_APIKEY (ATOLL_ENDPOINT, ATOLL_APIKEY); `ca_cert` to K8E_SANDBOX_CERT.
    """

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
        self._transport = Transport(find_route(endpoint, api_key, ca_cert))
        self._tenant = tenant_id
        self._default = (runtime_class, allowed_hosts)
        self._session = ""
        self._before = ""  # the default session that is gone
        self._replaced: Replaced | None = None  # told with the next result
        self._lock = Lock()

    @property
    def endpoint(self) -> str:
        return self._transport.route.endpoint

    # Running

    async def run(self, code: str, language: str = "bash", timeout: float = 30) -> ExecResult:
        """Run code in the default session."""
        request = wire.run_request("", code, language, timeout)
        for last in (False, True):
            request.session_id = await self.default_session()
            try:
                done = await self._exec(request, timeout)
            except NotFound as gone:
                # Only when the session itself is gone, so that nothing was started, is another one tried.
                if last or isinstance(gone, FileNotFound):
                    raise
                self._forget(request.session_id)
            else:
                replaced, self._replaced = self._replaced, None
                return wire.with_replaced(done, replaced)
        raise AssertionError("unreachable")

    async def exec(
        self, session_id: str, command: str, timeout: float = 30, workdir: str = "", *, user: str = ""
    ) -> ExecResult:
        """Run a shell command, as `user` inside (root), and wait for it."""
        request = wire.command_request(session_id, command, timeout, workdir=workdir, user=user)
        return await self._exec(request, timeout)

    async def exec_stream(
        self, session_id: str, command: str, timeout: float = 300, *, user: str = ""
    ) -> AsyncIterator[str]:
        """The output as text while it is produced. Closing the iterator kills the command."""
        request = wire.command_request(session_id, command, timeout, user=user)
        stub = await self._transport.stub()
        said = metadata(self._transport.route)
        call = stub.ExecStream(request, timeout=timeout + wire.SLACK_SECONDS, metadata=said)
        try:
            async for message in call:
                if message.chunk:
                    yield message.chunk
        except grpc.RpcError as failure:
            raise error_of(failure, acted=True) from None
        finally:
            call.cancel()

    async def exec_background(self, session_id: str, command: str, timeout: float = 0, *, user: str = "") -> str:
        """Start a command and leave it; returns the run id for `poll_run`."""
        request = wire.command_request(session_id, command, timeout, background=True, user=user)
        answer = await self._call("Exec", request, acts=True)
        run_id: str = answer.run_id
        return run_id

    async def poll_run(self, run_id: str) -> ExecResult:
        """Return the output so far of a command in the background, and how it ended."""
        return wire.exec_result(await self._call("PollRun", pb.PollRunRequest(run_id=run_id)))

    async def pip_install(self, session_id: str, packages: Iterable[str]) -> ExecResult:
        """Install packages; what pip printed is in `stdout`."""
        request = pb.PipInstallRequest(session_id=session_id, packages=wire.strings(packages))
        return wire.pip_result(await self._call("PipInstall", request, acts=True))

    # Sessions

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
        """A new session. An empty runtime class is the strongest this gateway has; `options` are further request fields."""
        request = wire.create_request(runtime_class, allowed_hosts, tenant_id or self._tenant, session_id, env, options)
        made: str = (await self._create(request)).session_id
        return made

    async def destroy_session(self, session_id: str) -> bool:
        """End a session and all that is in it."""
        answer = await self._call("DestroySession", pb.DestroySessionRequest(session_id=session_id))
        if self._session == session_id:
            self._session = ""
        return bool(answer.ok)

    async def get_session(self, session_id: str) -> Session:
        """Return the state of a session."""
        return wire.session(await self._call("GetSession", pb.GetSessionRequest(session_id=session_id)))

    async def list_sessions(self, phase: str = "") -> list[Session]:
        """Sessions in a phase (Active); `all` for every phase."""
        answer = await self._call("ListSessions", pb.ListSessionsRequest(phase=phase))
        return [wire.session(one) for one in answer.sessions]

    async def pause_session(self, session_id: str) -> bool:
        """End its processes and keep its files."""
        answer = await self._call("PauseSession", pb.PauseSessionRequest(session_id=session_id), acts=True)
        return bool(answer.ok)

    async def resume_session(self, session_id: str) -> bool:
        """Start a paused session again."""
        answer = await self._call("ResumeSession", pb.ResumeSessionRequest(session_id=session_id), acts=True)
        return bool(answer.ok)

    async def run_subagent(self, parent_session_id: str) -> str:
        """A session that shares its parent's /workspace; returns its id."""
        request = pb.RunSubAgentRequest(parent_session_id=parent_session_id)
        answer = await self._call("RunSubAgent", request, acts=True, timeout=wire.CREATE_SECONDS)
        made: str = answer.session_id
        return made

    async def update_allowed_hosts(self, session_id: str, hosts: Iterable[str]) -> list[str]:
        """Replace the names a session may reach; none: the default list again. Returns the list in force."""
        request = pb.UpdateAllowedHostsRequest(session_id=session_id, hosts=wire.strings(hosts))
        answer = await self._call("UpdateAllowedHosts", request)
        return list(answer.hosts)

    # Files, with the rights of `user` inside (root)

    async def write_file(
        self, session_id: str, path: str, content: str | bytes, mode: str = "w", *, user: str = ""
    ) -> bool:
        """Write a file; mode `a` appends."""
        request = wire.write_request(session_id, path, content, mode)
        answer = await self._call("WriteFile", request, acts=mode == "a", user=user)
        return bool(answer.ok)

    async def read_file(self, session_id: str, path: str, *, user: str = "") -> str:
        """A file's text; bytes that are not UTF-8 are replaced."""
        request = pb.ReadFileRequest(session_id=session_id, path=path)
        return wire.file_text(await self._call("ReadFile", request, user=user))

    async def read_file_bytes(self, session_id: str, path: str, *, user: str = "") -> bytes:
        """A file's exact bytes."""
        request = pb.ReadFileRequest(session_id=session_id, path=path)
        return wire.file_bytes(await self._call("ReadFile", request, user=user))

    async def list_files(self, session_id: str, since: int = 0, *, user: str = "") -> list[FileEntry]:
        """The files below /workspace, changed since (unix seconds)."""
        request = pb.ListFilesRequest(session_id=session_id, since=since)
        return wire.files(await self._call("ListFiles", request, user=user))

    # Approvals

    async def confirm_action(self, session_id: str = "", action: str = "", approval_id: str = "") -> Approval:
        """Ask for an approval (session and action), or wait for the decision on one (approval id)."""
        request = pb.ConfirmActionRequest(session_id=session_id, action=action, approval_id=approval_id)
        return wire.approval(await self._call("ConfirmAction", request, timeout=wire.CONFIRM_SECONDS))

    async def approve_action(self, approval_id: str, approved: bool = True, reason: str = "") -> bool:
        """Decide on an approval, with a key that may."""
        request = pb.ApproveActionRequest(approval_id=approval_id, approved=approved, reason=reason)
        answer = await self._call("ApproveAction", request, acts=True)
        return bool(answer.ok)

    # The default session

    async def default_session(self) -> str:
        """Its id; made on the first call. A tenant's is the same for every client of the tenant."""
        async with self._lock:
            if not self._session:
                more = {"obtain": True, "before": self._before}
                request = wire.create_request(*self._default, self._tenant, "", None, more)
                answer = await self._create(request)
                if answer.HasField("replaced"):
                    self._replaced = wire.replaced(answer.replaced)
                self._session, self._before = answer.session_id, ""
            return self._session

    def _forget(self, session_id: str) -> None:
        if self._session == session_id:
            self._session, self._before = "", session_id

    async def close(self) -> None:
        """Let go of the channel; a default session without a tenant ends."""
        session, self._session = self._session, ""
        if session and not self._tenant:
            with suppress(AtollError):
                await self.destroy_session(session)
        await self._transport.close()

    async def __aenter__(self) -> AsyncSandboxClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def _create(self, request: Any) -> Any:
        """Make or obtain a session. When the answer is lost it is asked for again: the request id makes it the same one."""
        for attempt in range(wire.CREATE_ATTEMPTS):
            try:
                waits = attempt > 0
                return await self._call("CreateSession", request, acts=True, timeout=wire.CREATE_SECONDS, waits=waits)
            except OutcomeUnknown:
                if attempt == wire.CREATE_ATTEMPTS - 1:
                    raise
                await self._transport.recover()
        raise AssertionError("unreachable")

    async def _exec(self, request: Any, timeout: float) -> ExecResult:
        return wire.exec_result(await self._call("Exec", request, acts=True, timeout=timeout + wire.SLACK_SECONDS))

    async def _call(
        self,
        name: str,
        request: Any,
        *,
        acts: bool = False,
        timeout: float = wire.CALL_SECONDS,
        waits: bool = False,
        user: str = "",
    ) -> Any:
        """Send a request. `acts`: it must not be done twice. `waits`: for a gateway that is just starting again."""
        stub = await self._transport.stub()
        said = metadata(self._transport.route, user)
        try:
            return await getattr(stub, name)(request, timeout=timeout, metadata=said, wait_for_ready=waits)
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
