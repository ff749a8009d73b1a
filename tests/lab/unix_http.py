"""HTTP to a daemon's socket."""

import http.client
import os
import socket

from lab.waiting import PATIENCE


class UnixConnection(http.client.HTTPConnection):
    """A connection to the socket at a path."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        super().__init__("daemon", timeout=PATIENCE)
        self.path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(PATIENCE)
        self.sock.connect(os.fspath(self.path))
