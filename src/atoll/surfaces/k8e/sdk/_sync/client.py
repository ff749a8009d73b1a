"""`SandboxClient` and `sandbox_session`: K8E's Python SDK, over gRPC.

    with SandboxClient() as client:
        print(client.run("print('hello')", language="python").stdout)

One channel, safe to share between threads. Errors are those of `atoll.errors`; nothing is ever run twice, except that a
default session which is provably gone is replaced by a new one.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import Any

import grpc

from atoll.client.route import find_route
from atoll.errors import AtollError, FileNotFound, NotFound
from atoll.proto.sandbox.v1 import sandbox_pb2 as pb
from atoll.proto.sandbox.v1 import sandbox_pb2_grpc
from atoll.surfaces.k8e.grpc.status import error_of

from .. import wire as wire
from ..channel import metadata, open_channel, ready
from ..wire import Approval, ExecResult, FileEntry, Session

__all__ = ["Approval", "ExecResult", "FileEntry", "SandboxClient", "Session", "sandbox_session"]


class SandboxClient:
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
        self._route = ready(find_route(endpoint, api_key, ca_cert))
        self._tenant = tenant_id
        self._default = (runtime_class, allowed_hosts)
        self._session = ""
        self._lock = threading.Lock()
        self._channel = open_channel(self._route)
        self._stub: Any = sandbox_pb2_grpc.SandboxServiceStub(self._channel)

    @property
    def endpoint(self) -> str:
        return self._route.endpoint

    # Running

    def run(self, code: str, language: str = "bash", timeout: float = 30) -> ExecResult:
        """Run code in the default session."""
        request = wire.run_request("", code, language, timeout)
        for last in (False, True):
            request.session_id = self.default_session()
            try:
                return self._exec(request, timeout)
            except NotFound as gone:
                # Only when the session itself is gone, so that nothing was started, is another one tried.
                if last or isinstance(gone, FileNotFound):
                    raise
                self._forget(request.session_id)
        raise AssertionError("unreachable")

    def exec(self, session_id: str, command: str, timeout: float = 30, workdir: str = "") -> ExecResult:
        """Run a shell command and wait for it."""
        return self._exec(wire.command_request(session_id, command, timeout, workdir=workdir), timeout)

    def exec_stream(self, session_id: str, command: str, timeout: float = 300) -> Iterator[str]:
        """The output as text while it is produced. Closing the iterator kills the command."""
        request = wire.command_request(session_id, command, timeout)
        call = self._stub.ExecStream(request, timeout=timeout + wire.SLACK_SECONDS, metadata=metadata(self._route))
        try:
            for message in call:
                if message.chunk:
                    yield message.chunk
        except grpc.RpcError as failure:
            raise error_of(failure, acted=True) from None
        finally:
            call.cancel()

    def exec_background(self, session_id: str, command: str, timeout: float = 0) -> str:
        """Start a command and leave it; returns the run id for `poll_run`."""
        request = wire.command_request(session_id, command, timeout, background=True)
        run_id: str = self._call("Exec", request, acts=True).run_id
        return run_id

    def poll_run(self, run_id: str) -> ExecResult:
        return wire.exec_result(self._call("PollRun", pb.PollRunRequest(run_id=run_id)))

    def pip_install(self, session_id: str, packages: Iterable[str]) -> ExecResult:
        """Install packages; what pip printed is in `stdout`."""
        request = pb.PipInstallRequest(session_id=session_id, packages=wire.strings(packages))
        return wire.pip_result(self._call("PipInstall", request, acts=True))

    # Sessions

    def create_session(
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
        made: str = self._call("CreateSession", request, acts=True, timeout=wire.CREATE_SECONDS).session_id
        return made

    def destroy_session(self, session_id: str) -> bool:
        ok: bool = self._call("DestroySession", pb.DestroySessionRequest(session_id=session_id)).ok
        self._forget(session_id)
        return ok

    def get_session(self, session_id: str) -> Session:
        return wire.session(self._call("GetSession", pb.GetSessionRequest(session_id=session_id)))

    def list_sessions(self, phase: str = "") -> list[Session]:
        answer = self._call("ListSessions", pb.ListSessionsRequest(phase=phase))
        return [wire.session(one) for one in answer.sessions]

    def pause_session(self, session_id: str) -> bool:
        return bool(self._call("PauseSession", pb.PauseSessionRequest(session_id=session_id), acts=True).ok)

    def resume_session(self, session_id: str) -> bool:
        return bool(self._call("ResumeSession", pb.ResumeSessionRequest(session_id=session_id), acts=True).ok)

    def run_subagent(self, parent_session_id: str) -> str:
        request = pb.RunSubAgentRequest(parent_session_id=parent_session_id)
        made: str = self._call("RunSubAgent", request, acts=True, timeout=wire.CREATE_SECONDS).session_id
        return made

    def update_allowed_hosts(self, session_id: str, hosts: Iterable[str]) -> list[str]:
        request = pb.UpdateAllowedHostsRequest(session_id=session_id, hosts=wire.strings(hosts))
        return list(self._call("UpdateAllowedHosts", request).hosts)

    # Files

    def write_file(self, session_id: str, path: str, content: str | bytes, mode: str = "w") -> bool:
        return bool(self._call("WriteFile", wire.write_request(session_id, path, content, mode), acts=mode == "a").ok)

    def read_file(self, session_id: str, path: str) -> str:
        return wire.file_text(self._call("ReadFile", pb.ReadFileRequest(session_id=session_id, path=path)))

    def read_file_bytes(self, session_id: str, path: str) -> bytes:
        return wire.file_bytes(self._call("ReadFile", pb.ReadFileRequest(session_id=session_id, path=path)))

    def list_files(self, session_id: str, since: int = 0) -> list[FileEntry]:
        return wire.files(self._call("ListFiles", pb.ListFilesRequest(session_id=session_id, since=since)))

    # Approvals

    def confirm_action(self, session_id: str = "", action: str = "", approval_id: str = "") -> Approval:
        """Ask for an approval (session and action), or wait for the decision on one (approval id)."""
        request = pb.ConfirmActionRequest(session_id=session_id, action=action, approval_id=approval_id)
        return wire.approval(self._call("ConfirmAction", request, timeout=wire.CONFIRM_SECONDS))

    def approve_action(self, approval_id: str, approved: bool = True, reason: str = "") -> bool:
        request = pb.ApproveActionRequest(approval_id=approval_id, approved=approved, reason=reason)
        return bool(self._call("ApproveAction", request, acts=True).ok)

    # The default session

    def default_session(self) -> str:
        """Its id; made on the first call, and with a tenant found again if another process has made it."""
        with self._lock:
            if not self._session:
                runtime, hosts = self._default
                self._session = self._tenants_session() or self.create_session(runtime, hosts)
            return self._session

    def _tenants_session(self) -> str:
        if not self._tenant:
            return ""
        mine = [one for one in self.list_sessions("all") if one.tenant_id == self._tenant]
        return wire.pick_session(mine)

    def _forget(self, session_id: str) -> None:
        with self._lock:
            if self._session == session_id:
                self._session = ""

    def close(self) -> None:
        """Let go of the channel; a default session without a tenant ends."""
        with self._lock:
            session, self._session = self._session, ""
        if session and not self._tenant:
            with suppress(AtollError):
                self.destroy_session(session)
        self._channel.close()

    def __enter__(self) -> SandboxClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _exec(self, request: Any, timeout: float) -> ExecResult:
        return wire.exec_result(self._call("Exec", request, acts=True, timeout=timeout + wire.SLACK_SECONDS))

    def _call(self, name: str, request: Any, *, acts: bool = False, timeout: float = wire.CALL_SECONDS) -> Any:
        try:
            return getattr(self._stub, name)(request, timeout=timeout, metadata=metadata(self._route))
        except grpc.RpcError as failure:
            raise error_of(failure, acted=acts) from None


@contextmanager
def sandbox_session(
    runtime_class: str = "",
    allowed_hosts: Iterable[str] | None = None,
    endpoint: str | None = None,
    **options: Any,
) -> Iterator[tuple[SandboxClient, str]]:
    """A client and a session of its own, which ends with the block."""
    with SandboxClient(endpoint, **options) as client:
        session = client.create_session(runtime_class, allowed_hosts)
        try:
            yield client, session
        finally:
            with suppress(NotFound):
                client.destroy_session(session)
