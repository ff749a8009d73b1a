"""The seam to egress: what a sandbox may reach, attached before any of its code runs.

Until a broker is plugged in a sandbox has loopback only, which is the safe end of every policy.
"""

from collections.abc import Awaitable, Callable
from typing import Any, Protocol

from atoll.model import CreateSandbox


class Network(Protocol):
    """What egress gives core. `attach` returns the call the backend makes with the new network namespace."""

    async def policy(self, spec: CreateSandbox) -> dict[str, Any]: ...

    async def attach(self, sandbox: str, policy: dict[str, Any]) -> Callable[[int], Awaitable[None]] | None: ...

    async def detach(self, sandbox: str) -> None: ...

    async def sweep(self, known: set[str]) -> None: ...


class Loopback:
    """No way out at all."""

    async def policy(self, spec: CreateSandbox) -> dict[str, Any]:
        return {"network": "none"}

    async def attach(self, sandbox: str, policy: dict[str, Any]) -> Callable[[int], Awaitable[None]] | None:
        return None

    async def detach(self, sandbox: str) -> None:
        return None

    async def sweep(self, known: set[str]) -> None:
        return None
