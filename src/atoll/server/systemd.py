"""What a daemon that systemd started owes it: its socket is taken over, its state is told, its messages go to the journal.

Nothing here needs a library of systemd's: a socket comes as a descriptor that two variables announce, the state is a datagram to the socket
that NOTIFY_SOCKET names, and the journal takes datagrams of `FIELD=value` lines. Each is left alone where the variable is not set.
"""

import logging
import os
import socket
from contextlib import suppress
from pathlib import Path

from atoll import errors

FIRST = 3  # the number of the first descriptor that is passed on
JOURNAL = "/run/systemd/journal/socket"
PRIORITIES = ((logging.CRITICAL, 2), (logging.ERROR, 3), (logging.WARNING, 4), (logging.INFO, 6))  # syslog's numbers
LONGEST = 48 * 1024  # bytes of one field; a longer message is cut, because a datagram has a bound


def take_socket(path: Path) -> socket.socket | None:
    """Return the listening socket of `path` that was passed to this very process; None where none was.

    The variables are taken out of the environment: they are about this process and none that it starts.
    """
    wanted, count = os.environ.pop("LISTEN_PID", ""), os.environ.pop("LISTEN_FDS", "")
    os.environ.pop("LISTEN_FDNAMES", None)
    if wanted != str(os.getpid()) or not count.isdigit():
        return None
    found = None
    for number in range(FIRST, FIRST + int(count)):
        passed = socket.socket(fileno=number)
        os.set_inheritable(number, False)
        listens = passed.family == socket.AF_UNIX and passed.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
        if found is None and listens and _is_at(passed, path):
            found = passed
        else:
            passed.close()
    if found is None:
        raise errors.FailedPrecondition(
            f"systemd passed {count} socket(s), and none listens at {path}",
            hint="give atoll.socket this path as ListenStream=, and atoll.service its directory as ATOLL_HOME",
        )
    found.setblocking(False)
    return found


def _is_at(passed: socket.socket, path: Path) -> bool:
    name = passed.getsockname()
    return isinstance(name, str) and os.path.realpath(name) == os.path.realpath(path)


class Manager:
    """The service manager that wants to know our state; nobody where NOTIFY_SOCKET is not set.

    The variable is taken out of the environment: an engine that finds it would show the socket to its sandbox.
    """

    def __init__(self) -> None:
        self._address = os.environ.pop("NOTIFY_SOCKET", "")

    def tell(self, state: str) -> None:
        """Send lines of state (`READY=1`, `STOPPING=1`, `STATUS=...`); a manager that is gone is no fault."""
        address = self._address
        if not address.startswith(("/", "@")):
            return
        with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as line:
            line.setblocking(False)
            line.sendto(state.encode(), "\0" + address[1:] if address.startswith("@") else address)


def stderr_is_journal() -> bool:
    """Tell whether our standard error leads to the journal: JOURNAL_STREAM names the file that does."""
    device, _, inode = os.environ.get("JOURNAL_STREAM", "").partition(":")
    try:
        ours = os.fstat(2)
    except OSError:
        return False
    return (device, inode) == (str(ours.st_dev), str(ours.st_ino))


class JournalHandler(logging.Handler):
    """Sends records to the journal, each with its priority, its logger and where in the source it was made."""

    def __init__(self, home: Path, address: str = JOURNAL) -> None:
        super().__init__()
        self._home = str(home)
        self._address = address
        self._line = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
        self._line.setblocking(False)  # a journal that does not read must not hold the daemon; daemon.log has it too

    def emit(self, record: logging.LogRecord) -> None:
        fields = {
            "MESSAGE": self.format(record),
            "PRIORITY": str(next((number for level, number in PRIORITIES if record.levelno >= level), 7)),
            "SYSLOG_IDENTIFIER": "atoll",
            "ATOLL_LOGGER": record.name,
            "ATOLL_HOME": self._home,
            "CODE_FILE": record.pathname,
            "CODE_LINE": str(record.lineno),
            "CODE_FUNC": record.funcName or "",
        }
        with suppress(OSError):  # nobody reads, or too many fields at once: daemon.log has it
            self._line.sendto(b"".join(map(encode_field, fields, fields.values())), self._address)

    def close(self) -> None:
        self._line.close()
        super().close()


def encode_field(name: str, value: str) -> bytes:
    """Return a field as the journal reads it: a value of several lines has its length in front."""
    data = value.encode("utf-8", "replace")[:LONGEST]
    if b"\n" not in data:
        return b"%s=%s\n" % (name.encode(), data)
    return b"%s\n%s%s\n" % (name.encode(), len(data).to_bytes(8, "little"), data)
