"""Automatic sandboxes: one per tenant and gateway, remembered in a file, created by exactly one of many.

The file is `<data>/<tenant>/state.json` for the local daemon, `<data>/<tenant>/at-<endpoint>/state.json` for a gateway, so
that a run there leaves what is remembered of the others alone.

`state.lock` guards reading and writing, never the slow work in between: who finds no sandbox writes `creating` with his
pid and lets go; others look again every 200 ms. A creator that died, or took two minutes, is taken over.
"""

from __future__ import annotations

import fcntl
import os
import time

from ..client.codec import dumps, loads
from ..errors import InvalidArgument, Timeout

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

LOOK_AGAIN = 0.2
TAKE_OVER = 120.0
PATIENCE = 300.0


class State:
    """The state file of one tenant at one endpoint; an empty endpoint is the local daemon."""

    def __init__(self, data: str, tenant: str, endpoint: str = "") -> None:
        self.tenant = tenant
        self._directory = os.path.join(data, tenant)
        if endpoint:
            self._directory = os.path.join(self._directory, _place(endpoint))
        self._file = os.path.join(self._directory, "state.json")

    def current(self) -> str | None:
        """The sandbox recorded as active, if any."""
        entry, _ = self._read()
        return str(entry["session_id"]) if entry.get("phase") == "active" and entry.get("session_id") else None

    def obtain(self, create: Callable[[], str], discard: Callable[[str], None]) -> tuple[str, bool]:
        """The tenant's sandbox, created if there is none; and whether it was created here.

        `discard` ends a sandbox that came too late because somebody took this creator for dead.
        """
        until = time.monotonic() + PATIENCE
        while True:
            with self._locked():
                entry, age = self._read()
                if entry.get("phase") == "active" and entry.get("session_id"):
                    return str(entry["session_id"]), False
                if not _being_created(entry, age):
                    self._write_creating()
                    break
            if time.monotonic() > until:
                raise Timeout("another process has been creating the tenant's sandbox for too long")
            time.sleep(LOOK_AGAIN)
        return self._create(create, discard)

    def _create(self, create: Callable[[], str], discard: Callable[[str], None]) -> tuple[str, bool]:
        try:
            made = create()
        except BaseException:
            with self._locked():
                if self._is_ours(self._read()[0]):
                    self._remove()
            raise
        with self._locked():
            entry, _ = self._read()
            if entry.get("phase") != "active" or not entry.get("session_id"):
                self._write({"session_id": made, "phase": "active", "tenant_id": self.tenant, "created_at": _now()})
                return made, True
        discard(made)
        return str(entry["session_id"]), False

    def forget(self, session_id: str) -> None:
        """Drop the entry if it still names this sandbox."""
        if self.current() != session_id:
            return
        with self._locked():
            if self._read()[0].get("session_id") == session_id:
                self._remove()

    def _is_ours(self, entry: dict[str, Any]) -> bool:
        return entry.get("phase") == "creating" and entry.get("pid") == os.getpid()

    def _read(self) -> tuple[dict[str, Any], float]:
        """The entry and its age in seconds; an empty one when there is none or it is broken."""
        try:
            with open(self._file, "rb") as file:
                age = time.time() - os.fstat(file.fileno()).st_mtime
                entry = loads(file.read(65_536))
        except (OSError, ValueError):
            return {}, 0.0
        return (entry if isinstance(entry, dict) else {}), age

    def _write_creating(self) -> None:
        stamp = {"created_at": _now(), "locked_at": _now(), "pid": os.getpid()}
        self._write({"session_id": "", "phase": "creating", "tenant_id": self.tenant, **stamp})

    def _write(self, entry: dict[str, Any]) -> None:
        temporary = f"{self._file}.{os.getpid()}"
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            os.write(descriptor, (dumps(entry) + "\n").encode("ascii"))
        finally:
            os.close(descriptor)
        os.replace(temporary, self._file)

    def _remove(self) -> None:
        try:
            os.unlink(self._file)
        except FileNotFoundError:
            pass

    def _locked(self) -> _Lock:
        try:
            os.makedirs(self._directory, mode=0o700, exist_ok=True)
        except OSError as failure:
            raise InvalidArgument(f"cannot keep state in {self._directory}: {failure.strerror}") from None
        return _Lock(os.path.join(self._directory, "state.lock"))


class _Lock:
    """A file lock, held only while a state file is read and replaced."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._descriptor = -1

    def __enter__(self) -> None:
        self._descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        fcntl.flock(self._descriptor, fcntl.LOCK_EX)

    def __exit__(self, *_: object) -> None:
        os.close(self._descriptor)


def forget_everywhere(data: str, session_id: str, endpoint: str = "") -> None:
    """`destroy` clears every tenant's entry that names the sandbox, at this endpoint."""
    try:
        tenants = os.listdir(data)
    except OSError:
        return
    for tenant in tenants:
        if os.path.exists(os.path.join(data, tenant, "state.json")):
            State(data, tenant).forget(session_id)
        if endpoint and os.path.exists(os.path.join(data, tenant, _place(endpoint), "state.json")):
            State(data, tenant, endpoint).forget(session_id)


def _place(endpoint: str) -> str:
    """Return the directory's name for an endpoint: its own characters where a file name can have them."""
    from hashlib import sha256

    plain = "".join(c if (c.isalnum() and c.isascii()) or c in ".:-" else "_" for c in endpoint)
    return f"at-{plain[:80]}-{sha256(endpoint.encode()).hexdigest()[:8]}"


def _being_created(entry: dict[str, Any], age: float) -> bool:
    pid = entry.get("pid")
    if entry.get("phase") != "creating" or not isinstance(pid, int) or pid <= 0 or age > TAKE_OVER:
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        pass
    return True


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
