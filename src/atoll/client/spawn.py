"""Where the daemon is, and starting it exactly once however many clients want it at the same moment.

The one who holds `spawn.lock` starts the daemon and lets go only when its socket can be connected to; the others wait
for the lock and then find the daemon there. The daemon holds `daemon.lock` all its life, so that even a spawner that
was killed with the lock cannot lead to two.
"""

from __future__ import annotations

import errno
import os
import sys
import time
from _socket import socket as Socket  # the `socket` module wraps this in classes that cost 8 ms to import

from ..errors import DaemonUnreachable, PermissionDenied
from .portable import require_linux

START_DEADLINE = 60.0
SLOW_START = 600.0  # a daemon that is alive and still starting, on a slow machine, is waited for as long as this
LOG_LINES = 8
_LONGEST_NAME = 107  # sun_path holds 108 bytes with the closing zero
_ABSENT = (errno.ENOENT, errno.ECONNREFUSED, errno.ENOTDIR)

# A grandchild in a session of its own: it is nobody's child afterwards, so no zombie stays with a long-lived caller.
_DETACH = (
    "import os,sys\n"
    "pid=os.fork()\n"
    "if pid: os.write(1,b'%d'%pid); os._exit(0)\n"
    "os.closerange(3,os.sysconf('SC_OPEN_MAX')); os.setsid(); os.chdir('/'); os.dup2(2,1); os.execv(sys.argv[1],sys.argv[1:])\n"
)


def home_directory() -> str:
    """`ATOLL_HOME`, else `~/.atoll`, absolute."""
    return os.path.abspath(os.environ.get("ATOLL_HOME") or os.path.join(os.path.expanduser("~"), ".atoll"))


def socket_path(home: str) -> str:
    return os.path.join(home, "daemon.sock")


def connect(path: str, timeout: float | None) -> Socket:
    """A connected socket, or OSError. A path too long for a socket address goes through its directory's descriptor."""
    require_linux()
    from _socket import AF_UNIX, SOCK_CLOEXEC, SOCK_STREAM

    sock = Socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC)
    try:
        sock.settimeout(timeout)
        if len(os.fsencode(path)) <= _LONGEST_NAME:
            sock.connect(path)
            return sock
        directory = os.open(os.path.dirname(path), os.O_PATH | os.O_CLOEXEC)
        try:
            sock.connect(f"/proc/self/fd/{directory}/{os.path.basename(path)}")
        finally:
            os.close(directory)
        return sock
    except BaseException:
        sock.close()
        raise


def is_absent(failure: OSError) -> bool:
    """Whether this failure to connect means that no daemon is there (so one may be started)."""
    return failure.errno in _ABSENT


def refusal(path: str, failure: OSError) -> DaemonUnreachable | PermissionDenied:
    """The error for a daemon that is there, or should be, and cannot be reached."""
    if failure.errno in (errno.EACCES, errno.EPERM):
        hint = "set ATOLL_HOME to a directory of your own"
        return PermissionDenied(f"this user may not use the daemon at {path}", hint=hint)
    reason = failure.strerror or str(failure)
    return DaemonUnreachable(f"no daemon answers at {path}: {reason}", hint="atoll daemon start")


def ensure(home: str, deadline: float = START_DEADLINE) -> None:
    """Return when a daemon for `home` can be connected to, starting one if need be."""
    require_linux()
    import fcntl

    if not os.path.isdir(os.path.join(os.path.dirname(__file__), "..", "server")):
        raise DaemonUnreachable(
            "this is the client alone, and no daemon answers here",
            hint="use a gateway: --endpoint HOST:50051; or install atoll on this machine: sh install.sh",
        )
    until = time.monotonic() + deadline
    try:
        os.makedirs(home, mode=0o711, exist_ok=True)
        lock = os.open(os.path.join(home, "spawn.lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as failure:
        raise DaemonUnreachable(
            f"cannot start the daemon: {home}: {failure.strerror}", hint="set ATOLL_HOME to a directory you can write"
        ) from None
    try:
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if reachable(home):
                    return
                if time.monotonic() > until:
                    message = "another process has been starting the daemon for too long"
                    raise DaemonUnreachable(message, hint=_hint(home)) from None
                time.sleep(0.01)
        _start_until(home, until)
    finally:
        os.close(lock)


def reachable(home: str) -> bool:
    try:
        connect(socket_path(home), 5.0).close()
    except OSError:
        return False
    return True


def _start_until(home: str, until: float) -> None:
    """Holding the lock: start a daemon and wait for its socket; again if an old one was just leaving."""
    pid, log_start = 0, 0
    last = until + SLOW_START - START_DEADLINE
    while not reachable(home):
        if time.monotonic() > (last if pid and _alive(pid) else until):
            raise DaemonUnreachable(f"the daemon did not come up in time{_tail(home, log_start)}", hint=_hint(home))
        if pid and _alive(pid):
            time.sleep(0.005)
            continue
        if pid and not _held(home):
            if reachable(home):
                return
            raise DaemonUnreachable(f"the daemon stopped while starting{_tail(home, log_start)}", hint=_hint(home))
        if pid:
            time.sleep(0.1)  # an old daemon still holds its lock: it is on its way out
        pid, log_start = _spawn(home)


def _spawn(home: str) -> tuple[int, int]:
    """Start the daemon detached; its pid, and where its messages begin in the log."""
    log = os.open(os.path.join(home, "daemon.log"), os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    null = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    answer, tell = os.pipe2(os.O_CLOEXEC)
    argv = [sys.executable, "-S", "-E", "-c", _DETACH, sys.executable, *daemon_arguments(home)]
    try:
        start = os.fstat(log).st_size
        actions = [(os.POSIX_SPAWN_DUP2, null, 0), (os.POSIX_SPAWN_DUP2, tell, 1), (os.POSIX_SPAWN_DUP2, log, 2)]
        child = os.posix_spawn(sys.executable, argv, _environment(), file_actions=actions, setsigdef=(1, 2, 3, 13, 15))
        os.close(tell)
        tell = -1
        pid = os.read(answer, 32)
        os.waitpid(child, 0)
        return int(pid or b"0"), start
    except (OSError, ValueError) as failure:
        raise DaemonUnreachable(f"the daemon could not be started: {failure}") from None
    finally:
        for descriptor in (log, null, answer, tell):
            if descriptor >= 0:
                os.close(descriptor)


def daemon_arguments(home: str) -> list[str]:
    """Return the interpreter's arguments that run the daemon."""
    return ["-m", "atoll.server.daemon", "--home", home]


def _environment() -> dict[str, str]:
    """The caller's, made so that the daemon finds the same atoll; where the caller stood must not matter to it."""
    env = dict(os.environ)
    package_root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    if os.path.basename(package_root) not in ("site-packages", "dist-packages"):
        env["PYTHONPATH"] = os.pathsep.join([package_root, *filter(None, [env.get("PYTHONPATH")])])
    env["PYTHONSAFEPATH"] = "1"  # `-m` must not look into the working directory for modules
    return env


def _alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat", "rb") as stat:
            return stat.read().rpartition(b")")[2].split()[0] != b"Z"
    except (OSError, IndexError):
        return False


def _held(home: str) -> bool:
    """Whether some daemon still holds the lock of this home."""
    import fcntl

    try:
        lock = os.open(os.path.join(home, "daemon.lock"), os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return False
    except OSError:
        return True
    finally:
        os.close(lock)


def _hint(home: str) -> str:
    return f"see {os.path.join(home, 'daemon.log')}, or run: atoll doctor"


def _tail(home: str, start: int) -> str:
    """The last lines the daemon wrote since `start`, for the error message."""
    try:
        with open(os.path.join(home, "daemon.log"), "rb") as log:
            log.seek(max(start, os.fstat(log.fileno()).st_size - 16_384))
            lines = log.read().decode("utf-8", "replace").splitlines()
    except OSError:
        return ""
    said = [line for line in lines if line.strip()][-LOG_LINES:]
    return ":\n" + "\n".join(said) if said else ""
