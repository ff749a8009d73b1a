"""Automatic sandboxes: one per tenant and gateway, remembered in a file, so that a run needs one request.

The file is `<data>/<tenant>/state.json` for the local daemon, `<data>/<tenant>/at-<endpoint>/state.json` for a gateway, so
that a run there leaves what is remembered of the others alone. What is remembered is a hint: the daemon finds a tenant's
sandbox by itself, and makes it once, however many ask at once.
"""

from __future__ import annotations

import os
import time

from ..client.codec import dumps, loads
from ..client.portable import CLOSE_ON_EXEC, NO_FOLLOW, lock
from ..errors import InvalidArgument

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

DEFAULT = "default"


class State:
    """The state file of one tenant at one endpoint; an empty endpoint is the local daemon."""

    def __init__(self, data: str, tenant: str, endpoint: str = "") -> None:
        self.tenant = tenant
        self._data = data
        self._directory = os.path.join(data, tenant)
        if endpoint:
            self._directory = os.path.join(self._directory, _place(endpoint))
        self._file = os.path.join(self._directory, "state.json")

    @property
    def holder(self) -> str:
        """Whose sandbox it is within the tenant: `default` is no tenant, but each machine's own."""
        if self.tenant != DEFAULT:
            return ""
        from _socket import gethostname
        from hashlib import sha256

        machine = gethostname()
        try:
            with open("/etc/machine-id", encoding="ascii", errors="replace") as file:
                machine += file.read().strip()
        except OSError:
            pass
        return sha256(f"{machine}\0{os.path.abspath(self._data)}".encode("utf-8", "surrogateescape")).hexdigest()[:16]

    def current(self) -> str | None:
        """The sandbox recorded as active, if any."""
        entry = self._read()
        return str(entry["session_id"]) if entry.get("phase") == "active" and entry.get("session_id") else None

    def remember(self, session_id: str) -> None:
        """Record this sandbox as the tenant's."""
        with self.locked():
            self.write(session_id)

    def forget(self, session_id: str) -> None:
        """Drop the entry if it still names this sandbox."""
        if self.current() != session_id:
            return
        with self.locked():
            if self._read().get("session_id") == session_id:
                try:
                    os.unlink(self._file)
                except FileNotFoundError:
                    pass

    def write(self, session_id: str) -> None:
        """Replace the file in one step. The caller holds the lock."""
        now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        entry = {"session_id": session_id, "phase": "active", "tenant_id": self.tenant, "created_at": now}
        temporary = f"{self._file}.{os.getpid()}"
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | NO_FOLLOW | CLOSE_ON_EXEC, 0o600)
        try:
            os.write(descriptor, (dumps(entry) + "\n").encode("ascii"))
        finally:
            os.close(descriptor)
        os.replace(temporary, self._file)

    def locked(self) -> _Lock:
        """Return the lock of the file; the kernel lets go of it when its holder dies."""
        try:
            os.makedirs(self._directory, mode=0o700, exist_ok=True)
        except OSError as failure:
            raise InvalidArgument(f"cannot keep state in {self._directory}: {failure.strerror}") from None
        return _Lock(os.path.join(self._directory, "state.lock"))

    def _read(self) -> dict[str, Any]:
        """The entry; an empty one when there is none or it is broken."""
        try:
            with open(self._file, "rb") as file:
                entry = loads(file.read(65_536))
        except (OSError, ValueError):
            return {}
        return entry if isinstance(entry, dict) else {}


class _Lock:
    def __init__(self, path: str) -> None:
        self._path = path
        self._descriptor = -1

    def __enter__(self) -> None:
        self._descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | NO_FOLLOW | CLOSE_ON_EXEC, 0o600)
        lock(self._descriptor)

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
