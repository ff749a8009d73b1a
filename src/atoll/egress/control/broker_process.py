"""Starting, finding and ending the broker process, and the blocking first steps of talking to it."""

import json
import logging
import os
import signal
import socket
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import BinaryIO, Final, cast

import atoll
from atoll.egress.broker.process import Settings
from atoll.egress.control import wire
from atoll.egress.limits import Limits
from atoll.egress.router.router import RouterSockets
from atoll.errors import Unavailable

_SOCKET: Final = "egress.sock"
_LOG: Final = "broker.log"
_PID: Final = "broker.pid"
_MAX_FDS: Final = 8
_FDS: Final = 3
_MAX_LOG: Final = 1 << 20
_NICE: Final = -10
# The broker runs the very code of the daemon that starts it, wherever that was loaded from, and nothing from its cwd.
_BOOT: Final = (
    "import sys; root = sys.argv.pop(1); root in sys.path or sys.path.insert(0, root); "
    "from atoll.egress.broker.process import main; main()"
)
_log = logging.getLogger(__name__)


def spawn(
    state_dir: Path,
    sockets: RouterSockets,
    *,
    uid: int | None,
    host_net: int | None,
    servers: tuple[tuple[str, int], ...],
    hosts_file: str,
    limits: Limits,
) -> "subprocess.Popen[bytes]":
    """A new broker that listens on `state_dir`; it outlives this process."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    with listener, _open_log(state_dir / _LOG) as log:
        (state_dir / _SOCKET).unlink(missing_ok=True)
        with _ShortPath(state_dir) as path:
            listener.bind(path)
        os.chmod(state_dir / _SOCKET, 0o600)
        listener.listen(8)
        fds = list(sockets.filenos())
        settings = Settings(
            fds=fds,
            control=listener.fileno(),
            daemon_uid=os.geteuid(),
            uid=uid,
            host_net=host_net,
            servers=[list(server) for server in servers],
            hosts_file=hosts_file,
            limits=limits.to_dict(),
        )
        passed = [*fds, listener.fileno(), *([] if host_net is None else [host_net])]
        root = str(Path(atoll.__file__).resolve().parent.parent)
        process = subprocess.Popen(
            [sys.executable, "-I", "-c", _BOOT, root, json.dumps(asdict(settings))],
            pass_fds=passed,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            cwd="/",
            env={"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8", "ATOLL_LOG": os.environ.get("ATOLL_LOG", "WARNING")},
            start_new_session=True,
        )
        prefer(process.pid)
        (state_dir / _PID).write_text(f"{process.pid}\n")
        return process


def prefer(pid: int, *, crowd: bool = False) -> None:
    """Give the broker, a session of its own, more processor time than others get, where we may; while a crowd waits, the same.

    It works for all sandboxes, in shares: their own computing must not keep it from that. But with a crowd that never ends it
    would take a whole processor, and keep a neighbour's program from what it needs (`broker/crowd.py`). Where the kernel
    groups processes by session, the priority of a process counts only within its session, and that of the session among all others.
    """
    nice = 0 if crowd else _NICE
    try:
        os.setpriority(os.PRIO_PROCESS, pid, nice)
        Path(f"/proc/{pid}/autogroup").write_text(str(nice))
    except OSError as err:  # not root, or a kernel without such groups
        _log.debug("the broker's priority: %s", err)


@dataclass(frozen=True, slots=True)
class Found:
    """A broker that answered: the line to it, its version and process id, and the router's sockets it holds.

    `handover` takes the sockets of new links; a broker of another version has none.
    """

    connection: socket.socket
    handover: socket.socket | None
    version: int
    pid: int
    sockets: RouterSockets

    @property
    def speaks_our_version(self) -> bool:
        return self.version == wire.VERSION


def connect(state_dir: Path, timeout: float = 20.0) -> Found:
    """Reach the broker of `state_dir`; OSError or Unavailable when there is none."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.settimeout(timeout)
        with _ShortPath(state_dir) as path:
            sock.connect(path)
        greeting, fds, _, _ = socket.recv_fds(sock, wire.GREETING.size, _MAX_FDS)
        version, pid = wire.GREETING.unpack(greeting) if len(greeting) == wire.GREETING.size else (0, 0)
        if len(fds) < _FDS or (version == wire.VERSION and len(fds) != _FDS) or not version:
            for fd in fds:
                os.close(fd)
            raise Unavailable("the egress broker gave no sockets")
        for fd in fds:
            os.set_inheritable(fd, False)
        net, *between, log = fds
        handover = None
        if version == wire.VERSION:
            handover = socket.socket(fileno=between[0])
            handover.setblocking(False)
        else:
            for fd in between:
                os.close(fd)
        sock.setblocking(False)
        return Found(sock, handover, version, pid, RouterSockets.from_filenos((net, log)))
    except BaseException:
        sock.close()
        raise


def end_stranger(pid: int, uid: int | None) -> None:
    """End a broker that is not our child, if that process is still there and runs as a broker of ours would."""
    try:
        fd = os.pidfd_open(pid)
    except OSError:
        return
    try:
        if _runs_as(pid, uid):
            signal.pidfd_send_signal(fd, signal.SIGKILL)
    except OSError as err:
        _log.debug("broker %d: %s", pid, err)
    finally:
        os.close(fd)


def prefer_stranger(pid: int, uid: int | None, *, crowd: bool) -> None:
    """`prefer` for a broker that is not our child."""
    try:
        if _runs_as(pid, uid):
            prefer(pid, crowd=crowd)
    except OSError as err:
        _log.debug("broker %d: %s", pid, err)


def _runs_as(pid: int, uid: int | None) -> bool:
    """Whether a process has the ids of a broker: its number came from the broker, which must not get us to touch another."""
    with open(f"/proc/{pid}/status", encoding="ascii", errors="replace") as handle:
        uids = next((line.split()[1:] for line in handle if line.startswith("Uid:")), [])
    return set(uids) == {str(os.geteuid() if uid is None else uid)}


def end_hung(state_dir: Path, uid: int | None) -> None:
    """End the broker this directory last started, which does not answer."""
    try:
        pid = int((state_dir / _PID).read_text())
        started = (
            b"atoll.egress.broker.process" in Path(f"/proc/{pid}/cmdline").read_bytes()
        )  # a number may have been used again
    except (OSError, ValueError):
        return
    if started:
        _log.warning("the egress broker %d hangs; ending it", pid)
        end_stranger(pid, uid)


def _open_log(path: Path) -> BinaryIO:
    """The broker's own log, which keeps the last words of the one before unless it has grown too long."""
    mode = "ab" if path.exists() and path.stat().st_size < _MAX_LOG else "wb"
    return cast(BinaryIO, open(path, mode))


class _ShortPath:
    """A path to the socket that fits in sun_path however deep the state directory is."""

    def __init__(self, state_dir: Path) -> None:
        self._dir = state_dir
        self._fd = -1

    def __enter__(self) -> str:
        self._fd = os.open(self._dir, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        return f"/proc/self/fd/{self._fd}/{_SOCKET}"

    def __exit__(self, *_: object) -> None:
        os.close(self._fd)
