"""How the daemon offers gRPC, and REST beside it on TCP: a Unix socket for the local user always, TLS where it is told to.

gRPC and the certificate machinery cost a tenth of a second and tens of megabytes, which a daemon that only serves the local
CLI never needs: with the Unix socket alone they are loaded when the first connection comes.
"""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import tempfile
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from atoll.accounts import Accounts
from atoll.core import Core
from atoll.core.access.credentials import Doorkeeper
from atoll.errors import InvalidArgument
from atoll.server.rest_over_tls import RestOverTls

from .doors import Doors

if TYPE_CHECKING:
    import ssl

    from atoll.server.tls import Authority

RENEW_CHECK_SECONDS = 6 * 3600.0
_log = logging.getLogger(__name__)


Starter = Callable[[Doors, Doorkeeper, "Authority"], Awaitable[Any]]


class Gateway:
    """The listeners, and the server behind them once it is needed. `port` is the TCP port, 0 without one."""

    def __init__(
        self,
        home: Path,
        keeper: Doorkeeper,
        authority: Authority | None,
        starter: Starter,
        books: Accounts | None = None,
        app: Any = None,
    ) -> None:
        self.home = home
        self.port = 0
        self.keeper = keeper
        self.context: ssl.SSLContext | None = None
        self._authority = authority
        self._starter = starter
        self._server: Any = None
        self._starting = asyncio.Lock()
        self._renewal: asyncio.Task[None] | None = None
        self._directory = _make_directory(home)
        self._rest = RestOverTls(app, keeper) if app is not None else None
        rest = self._rest.make if self._rest is not None else None
        self.doors = Doors(self._directory / "s", self._ensure, keeper.identify, books, rest)

    @property
    def socket(self) -> Path:
        return self.home / "grpc.sock"

    async def open_unix(self) -> None:
        await self.doors.open_unix(self.socket)

    def hide(self) -> None:
        """Nobody new finds the Unix socket; who is in the queue still gets in."""
        self.socket.unlink(missing_ok=True)

    async def open_tcp(self, addresses: Sequence[tuple[str, int]]) -> None:
        """Start now, and listen with TLS. A port of 0 is chosen once and used for every address."""
        await self._ensure()
        authority = self._authority
        if authority is None:
            raise RuntimeError("TCP needs the certificate authority")
        self.context = self.context or authority.server_context()
        for host, port in addresses:
            self.port = await self.doors.open_tcp(host, port or self.port, self.context)
        self._noted.write_text("".join(f"{host}:{port or self.port}\n" for host, port in addresses))
        if self._renewal is None:
            self._renewal = asyncio.ensure_future(self._renew(authority))

    async def close(self, grace: float = 1.0) -> None:
        """Stop listening, give running calls `grace` seconds, then cut them off."""
        if self._renewal is not None:
            self._renewal.cancel()
        ends = [self._server.stop(grace)] if self._server is not None else []
        ends += [self._rest.close(grace)] if self._rest is not None else []
        await asyncio.gather(*ends)
        await self.doors.close()
        await asyncio.to_thread(shutil.rmtree, self._directory, ignore_errors=True)
        self.hide()
        self._noted.unlink(missing_ok=True)

    @property
    def _noted(self) -> Path:
        """Where the TCP addresses are written down, for whoever asked for port 0."""
        return self.home / "grpc.endpoint"

    async def _ensure(self) -> None:
        if self._server is not None:
            return
        async with self._starting:
            if self._server is None:
                if self._authority is None:
                    self._authority = await asyncio.to_thread(_authority, self.home, "")
                    self.keeper.ledger = self._authority
                self._server = await self._starter(self.doors, self.keeper, self._authority)

    async def _renew(self, authority: Authority) -> None:
        """A daemon may run for longer than its certificate lives."""
        while True:
            await asyncio.sleep(RENEW_CHECK_SECONDS)
            try:
                if await asyncio.to_thread(authority.ensure) and self.context is not None:
                    self.context.load_cert_chain(authority.server_cert_file, authority.server_key_file)
            except (OSError, ValueError) as trouble:
                _log.error("the gateway's certificate could not be renewed: %s", trouble)


async def serve(core: Core, app: Any, *, tcp: bool = False, listen: Sequence[str] | None = None) -> Gateway:
    """Start the gateway for the daemon. `app` is the REST application, for HTTP/1.1 on TCP; with `tcp` the addresses of `listen`, else
    those of the operator's settings, are opened too."""
    settings = core.config.gateway.grpc
    addresses = [parse_address(text) for text in (settings.listen if listen is None else listen)] if tcp else []
    authority = (
        await asyncio.to_thread(_authority, core.home, _advertised() or settings.advertised) if addresses else None
    )

    async def starter(doors: Doors, keeper: Doorkeeper, authority: Authority) -> Any:
        server = await asyncio.to_thread(_load_server)
        return await server.start(doors, server.services(core, authority), keeper)

    core.keeper.ledger = authority
    gateway = Gateway(core.home, core.keeper, authority, starter, core.accounts, app)
    try:
        if addresses:
            await gateway.open_tcp(addresses)
        await gateway.open_unix()
    except BaseException:
        await gateway.close(0)
        raise
    return gateway


def parse_address(text: str) -> tuple[str, int]:
    """`host:port`, `[::1]:port`, `:port` (every IPv4 address) or a bare port (loopback)."""
    host, _, port = text.rpartition(":")
    if not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise InvalidArgument(f"not an address to listen on: {text!r:.80}", hint="for example 127.0.0.1:50051")
    if ":" not in text:
        return "127.0.0.1", int(port)
    return host.strip("[]") or "0.0.0.0", int(port)


def _advertised() -> str:
    """Return the name that the environment gives this gateway."""
    environment = os.environ
    return environment.get("ATOLL_ADVERTISED_HOSTNAME") or environment.get("K8E_SANDBOX_ADVERTISED_HOSTNAME") or ""


def _authority(home: Path, advertised: str) -> Authority:
    from atoll.server.tls import Authority

    made = Authority(home / "tls", advertised=advertised)
    made.ensure()
    return made


def _load_server() -> Any:
    # The daemon starts programs, never forks into Python; gRPC's fork handlers would only get in the way and complain.
    os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    # The thread that waits for events then also reads the sockets, where otherwise a pool of threads does and wakes it: two
    # switches and a third of gRPC's own time less for each call. A gRPC that no longer has the switch ignores it.
    os.environ.setdefault("GRPC_EXPERIMENTS", "-event_engine_listener")
    from . import server

    return server


def _make_directory(home: Path) -> Path:
    """Socket paths end at 107 bytes, and a home may be full: then another place, which mkdtemp makes just as private."""
    if len(os.fsencode(home)) < 70:
        with suppress(OSError):
            return Path(tempfile.mkdtemp(prefix="grpc-", dir=home))
    return Path(tempfile.mkdtemp(prefix="atoll-grpc-"))
