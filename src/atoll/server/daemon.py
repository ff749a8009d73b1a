"""The daemon: one process per user and state directory, started on demand, gone when there is nothing to do.

    python -m atoll.server.daemon --home ~/.atoll

It holds `daemon.lock` all its life, agrees with the machine about what runs before its socket appears, and leaves
sandboxes running whenever it ends, whether asked or killed; only a forced stop ends them.
"""

import argparse
import asyncio
import fcntl
import logging
import os
import resource
import signal
import socket
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from atoll import config, errors
from atoll.backends.contract import Backend, NetworkEvents
from atoll.backends.local.kernel import delegation, rootless
from atoll.core import Core
from atoll.core.policy.images import Images, PodImages
from atoll.core.store.database import StoreFailed
from atoll.server import systemd
from atoll.server.app import RestApp
from atoll.server.exposed import ExposedPorts
from atoll.server.routes import Stopping
from atoll.server.server import Listener
from atoll.surfaces.k8e.grpc.gateway import Gateway
from atoll.surfaces.k8e.grpc.gateway import serve as open_grpc

if TYPE_CHECKING:
    from atoll.server.tls import Authority

log = logging.getLogger("atoll.daemon")

PATIENCE = 5.0
MAX_LOG = 16 * 1024 * 1024
CHECK = 5.0
HELD = 75  # exit status: another daemon has this home


class Daemon:
    """The process around a Core. `stop` and `pin` are what REST may do to it.

    `grpc` names the TCP addresses for gRPC; None: its Unix socket alone, empty: those of the operator's settings.
    """

    def __init__(
        self,
        home: Path,
        core: Core,
        grpc: list[str] | None = None,
        passed: socket.socket | None = None,
    ) -> None:
        self.home = home
        self.core = core
        self.started_at = time.time()
        self.rest = RestApp(core, self)
        core.key_verbs.certificates = self._certificates
        self.listener = Listener(self.rest, home / "daemon.sock", passed)
        self.gateway: Gateway | None = None
        self.exposed = ExposedPorts(
            core.exposures, core.ports, core.store, core.config.gateway.expose_base_url, core.accounts
        )
        self._grpc = grpc
        self._manager = systemd.Manager()
        self._stopping = asyncio.Event()
        self.pinned = grpc is not None

    def pin(self) -> None:
        self.pinned = True

    def _certificates(self) -> "Authority | None":
        """Return the ledger of certificates; None where none was ever issued."""
        from atoll.server.tls import Authority

        directory = self.core.home / "tls"
        return Authority(directory) if directory.is_dir() else None

    async def stop(self, force: bool) -> Stopping:
        """Stop soon. With `force` all sandboxes are destroyed first; where one cannot be, the daemon stays and says so."""
        sandboxes = self.core.sandboxes
        late: list[str] = []
        if force:
            living = self._living()
            ends = (sandboxes.end(sandbox, "destroyed", "daemon stop --force", owner) for sandbox, owner in living)
            outcome = await asyncio.gather(*ends, return_exceptions=True)
            failed = {s: str(e) for (s, _), e in zip(living, outcome, strict=True) if isinstance(e, BaseException)}
            for sandbox, why in failed.items():
                log.error("sandbox %s could not be ended: %s", sandbox, why)
            if failed:
                raise errors.Internal(
                    f"the daemon stays, because {len(failed)} of {len(living)} sandboxes could not be ended",
                    hint="see daemon.log; without --force it stops and they run on",
                    details={"sandboxes": failed},
                )
            sandboxes.unwritten.settle()
            if late := sandboxes.unwritten.ids():
                log.error("the ends of these sandboxes could not be recorded: %s", ", ".join(late))
        delegation.forget(self.home)
        asyncio.get_running_loop().call_later(0.05, self._stopping.set)
        return {"stopping": True, "sandboxes": len(self._living()), "unrecorded": late}

    def _living(self) -> list[tuple[str, str]]:
        """The id and owner of every sandbox that has not ended; without the store, of those that run."""
        sandboxes = self.core.sandboxes
        try:
            rows = [(row["id"], row["owner"]) for row in self.core.store.living()]
        except errors.AtollError as error:
            log.error("the store cannot be read, so only running sandboxes are known: %s", error)
            rows = [(live.id, live.owner) for live in sandboxes.live.values()]
        return [(sandbox, owner) for sandbox, owner in rows if sandboxes.unwritten.of(sandbox).get("state") != "ended"]

    async def run(self) -> None:
        """Serve until stopped, told by a signal, or idle for long."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stopping.set)
        await self.core.start()
        try:
            self.gateway = await open_grpc(self.core, self.rest, tcp=self._grpc is not None, listen=self._grpc or None)
            await self.core.exposures.attach(self.exposed)
            await self.listener.open()
            log.info("serving %s, pid %d", self.home, os.getpid())
            self._manager.tell(f"READY=1\nSTATUS=serving {self.home}")
            idle = asyncio.create_task(self._leave_when_idle())
            await self._stopping.wait()
            idle.cancel()
        finally:
            self._manager.tell("STOPPING=1")
            log.info("stopping; %d sandboxes go on", len(self._living()))
            self.listener.hide()
            await self.core.doze.close()
            await self.core.sandboxes.close()  # first: a request that is cut must not cancel its command
            if self.gateway is not None:
                await self.gateway.close(PATIENCE)
            await self.exposed.close()
            await self.listener.close(PATIENCE)
            await self.core.close()

    async def _leave_when_idle(self) -> None:
        limit = self.core.config.daemon.idle_exit_s
        if not limit:
            return
        since = time.monotonic()
        while True:
            await asyncio.sleep(min(CHECK, limit))
            if self.pinned or self._connections or self.core.store.count_live():
                since = time.monotonic()
            elif time.monotonic() - since >= limit and await self._nobody_comes():
                log.info("nothing to do for %.0f s", limit)
                self._stopping.set()
                return

    async def _nobody_comes(self) -> bool:
        """Take the socket away and look once more, so that no caller is accepted by a daemon that leaves."""
        self.listener.hide()
        if self.gateway is not None:
            self.gateway.hide()
        await asyncio.sleep(0.1)
        if not self._connections:
            return True
        if self.gateway is not None:
            await self.gateway.open_unix()
        await self.listener.open()
        return False

    @property
    def _connections(self) -> int:
        return self.listener.connections + (self.gateway.doors.connections if self.gateway is not None else 0)


def take_lock(home: Path) -> TextIO:
    """The lock that makes this the only daemon of its home; SystemExit when there is one already."""
    held = os.open(home / "daemon.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    lock = open(held, "r+", encoding="ascii")  # noqa: SIM115  # held for life
    os.fchmod(lock.fileno(), 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        print("another daemon is running here", file=sys.stderr)
        raise SystemExit(HELD) from None
    said = f"{os.getpid()}\n".encode()
    try:
        os.pwrite(lock.fileno(), said, 0)  # not truncated first: on a full disk the block might be gone
        os.truncate(lock.fileno(), len(said))
    except OSError as error:
        print(f"daemon.lock does not say who holds it: {error}", file=sys.stderr)
    return lock


def prepare_home(home: Path) -> None:
    home.mkdir(mode=0o711, parents=True, exist_ok=True)
    status = home.stat()
    if status.st_uid != os.geteuid():
        raise errors.PermissionDenied(f"{home} belongs to another user", hint="set ATOLL_HOME to a directory of yours")
    home.chmod(0o711)


def start_log(home: Path, level: str) -> None:
    """Everything goes to daemon.log; what a crash prints goes there too when the spawner made it our stderr."""
    path = home / "daemon.log"
    try:
        if path.stat().st_size > MAX_LOG:
            path.replace(home / "daemon.log.1")
    except FileNotFoundError:
        pass
    handler = logging.FileHandler(path, encoding="utf-8", errors="replace")
    path.chmod(0o600)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    handlers: list[logging.Handler] = [handler]
    if systemd.stderr_is_journal():
        handlers.append(systemd.JournalHandler(home))
    logging.basicConfig(level=level.upper(), handlers=handlers, force=True)
    logging.getLogger("uvicorn").setLevel(logging.ERROR)


def allow_many_files() -> None:
    """Each sandbox takes a few descriptors; the usual soft limit would be reached by some hundred of them."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    except (OSError, ValueError) as error:
        log.warning("the limit of open files stays as it is: %s", error)


def local_backend(home: Path, settings: config.Config | None = None) -> Backend:
    from atoll.backends.local import LocalBackend
    from atoll.backends.local.layers import Layers
    from atoll.backends.local.network import Links
    from atoll.backends.local.pool import Settings as PoolSettings
    from atoll.core.policy.network import Settings as EgressSettings

    settings = settings or config.Config()
    refuse = settings.security.version_floor == "refuse"
    egress = EgressSettings.of(settings.egress, settings.sandboxes.hosts or ())
    authority = settings.images.ca_file
    return LocalBackend(
        home,
        layers=Layers(home / "images", Path(authority) if authority else None),
        links=Links(home, egress.servers, egress.limits),
        pool=PoolSettings(settings.pool.floor, max(settings.pool.floor, settings.pool.ceiling)),
        refuse_old=refuse,
        engines=(settings.backend.container_engine, f"qemu-{settings.microvm.accel}"),
    )


def kubernetes_backend(home: Path, settings: config.Config) -> Backend:
    from atoll.backends.kubernetes import Carried, KubernetesBackend, Settings
    from atoll.core.policy.network import Settings as EgressSettings

    egress = EgressSettings.of(settings.egress, settings.sandboxes.hosts or ())
    chosen = settings.backend.kubernetes
    return KubernetesBackend(
        Settings(
            Path(chosen.key_file) if chosen.key_file else home / "kubernetes.key",
            chosen.namespace,
            chosen.kubeconfig,
            chosen.context,
            chosen.lease_s,
            chosen.stopped_s,
            chosen.start_s,
            chosen.unreachable_s,
            chosen.canary_s,
            chosen.runtimes,
        ),
        Carried(home, egress.servers, egress.limits),
    )


def local_images(home: Path, settings: config.Config) -> Images:
    from atoll.core.policy.images import StoredImages

    return StoredImages(home / "images", settings.images)


async def serve(home: Path, grpc: list[str] | None = None, passed: socket.socket | None = None) -> None:
    settings = config.load(home)
    in_cluster = settings.backend.kind == "kubernetes"
    backend = (kubernetes_backend if in_cluster else local_backend)(home, settings)
    images: Images = PodImages() if in_cluster else local_images(home, settings)
    try:
        core = Core(home, backend, images, settings)
    except StoreFailed as failed:
        if not failed.damaged:
            raise
        raise await end_without_store(backend, failed) from failed
    await Daemon(home, core, grpc, passed).run()


async def end_without_store(backend: Backend, failed: Exception) -> errors.AtollError:
    """End all that runs, because no daemon can answer for it while its records cannot be read; the error that says so.

    The files of each sandbox stay where they are, for when the store is back.
    """
    await backend.start(NetworkEvents())
    try:
        ended = await backend.sweep(set(), keep_disk=True)
    finally:
        await backend.close()
    log.error("the store cannot be opened (%s); ended and not recorded: %s", failed, ", ".join(ended) or "nothing")
    told = f"; ended and not recorded: {', '.join(ended)}" if ended else "; no sandbox is running"
    return errors.Unavailable(
        f"the store cannot be opened: {failed}{told}",
        hint="bring back a copy of atoll.db; without one move it away, and kept files go at the next start",
    )


def main(arguments: list[str] | None = None) -> int:
    import uvloop

    parser = argparse.ArgumentParser(prog="atoll daemon")
    parser.add_argument("--home", type=Path, required=True)
    parser.add_argument(
        "--grpc", action="append", metavar="ADDRESS", help="serve gRPC with TLS there; `default`: as configured"
    )
    given = parser.parse_args(arguments)
    home = Path(os.path.abspath(given.home))
    grpc = None if given.grpc is None else [address for address in given.grpc if address != "default"]
    os.umask(0o077)
    try:
        if config.load(home).backend.kind == "local":
            delegation.ensure(home)
            rootless.enter(home / "run")
        prepare_home(home)
        passed = systemd.take_socket(home / "daemon.sock")
        lock = take_lock(home)
        start_log(home, config.load(home).daemon.log_level)
        allow_many_files()
        uvloop.run(serve(home, grpc, passed))
        lock.close()
    except errors.AtollError as error:
        print(f"{error.code}: {error.message}" + (f" ({error.hint})" if error.hint else ""), file=sys.stderr)
        return 1
    except OSError as error:
        print(f"the daemon cannot run: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
