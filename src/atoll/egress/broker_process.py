"""Starting, finding and ending the broker process, and the blocking first steps of talking to it."""

import json
import os
import socket
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Final

import atoll
from atoll.egress import wire
from atoll.egress.broker import Settings
from atoll.egress.router import RouterSockets
from atoll.errors import Unavailable

_SOCKET: Final = "egress.sock"
_LOG: Final = "broker.log"
_FDS: Final = 5
# The broker runs the very code of the daemon that starts it, wherever that was loaded from, and nothing from its cwd.
_BOOT: Final = "import sys; sys.path.append(sys.argv.pop(1)); from atoll.egress.broker import main; main()"


def spawn(
    state_dir: Path,
    sockets: RouterSockets,
    *,
    uid: int | None,
    host_net: int | None,
    servers: tuple[tuple[str, int], ...],
    hosts_file: str,
) -> "subprocess.Popen[bytes]":
    """A new broker that listens on `state_dir`; it outlives this process."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    with listener, open(state_dir / _LOG, "wb") as log:
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
        )
        passed = [*fds, listener.fileno(), *([] if host_net is None else [host_net])]
        root = str(Path(atoll.__file__).resolve().parent.parent)
        return subprocess.Popen(
            [sys.executable, "-I", "-c", _BOOT, root, json.dumps(asdict(settings))],
            pass_fds=passed,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            cwd="/",
            env={"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8", "ATOLL_LOG": os.environ.get("ATOLL_LOG", "WARNING")},
            start_new_session=True,
        )


def connect(state_dir: Path, timeout: float = 20.0) -> tuple[socket.socket, int, RouterSockets]:
    """Reach the broker of `state_dir`: the connection, its protocol version, and the router's sockets it holds."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.settimeout(timeout)
        with _ShortPath(state_dir) as path:
            sock.connect(path)
        version, fds, _, _ = socket.recv_fds(sock, 1, _FDS)
        if len(version) != 1 or len(fds) != _FDS:
            for fd in fds:
                os.close(fd)
            raise Unavailable("the egress broker gave no sockets")
        for fd in fds:
            os.set_inheritable(fd, False)
        sock.setblocking(False)
        return sock, version[0], RouterSockets.from_filenos(fds)
    except BaseException:
        sock.close()
        raise


def speaks_our_version(version: int) -> bool:
    return version == wire.VERSION


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
