"""Floods of a daemon, each run as a program of its own: `python -m lab.floods KIND SETTINGS.json SHARE OF`, until it is ended.

After each thing it has done it writes how many it has done and how many of them were refused into `SETTINGS.json.SHARE`, 16 bytes,
so that who measures beside it knows at every moment what it does.
"""

import http.client
import io
import json
import mmap
import os
import random
import socket
import ssl
import struct
import sys
import tarfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lab.raw_http2 import NOBODY, RawClient

MANY_FILES = 3000
COUNTS = struct.Struct("=qq")
done = [0]
refused = [0]


class Unix(http.client.HTTPConnection):
    def __init__(self, path: str) -> None:
        super().__init__("daemon", timeout=120)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(120)
        self.sock.connect(self._path)


class Flood:
    """`settings`: home, sandboxes, port, ca, keys (by sandbox), url."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self.settings = settings
        self.socket = f"{settings['home']}/daemon.sock"
        self.sandboxes: list[str] = settings["sandboxes"]

    def asking(self, number: int, method: str, tail: str, body: bytes | None = None) -> Callable[[], None]:
        """The same request again and again, on one connection."""
        connection = Unix(self.socket)
        path = tail if tail.startswith("/v1") else f"/v1/sandboxes/{self.sandboxes[number]}{tail}"

        def ask() -> None:
            connection.request(method, path, body)
            answer = connection.getresponse()
            while answer.read(1 << 20):
                pass
            refused[0] += answer.status >= 400

        return ask

    def small_execs(self, number: int) -> Callable[[], None]:
        return self.asking(number, "POST", "/exec", b'{"argv": ["/bin/true"]}')

    def large_outputs(self, number: int) -> Callable[[], None]:
        command = json.dumps({"command": "head -c 16000000 /dev/zero | tr '\\0' 'x\\n'"}).encode()
        return self.asking(number, "POST", "/exec", command)

    def lists(self, number: int) -> Callable[[], None]:
        wish = {"path": "/workspace/many", "recursive": True, "limit": 1_000_000}
        return self.asking(number, "POST", "/files/list", json.dumps(wish).encode())

    def greps(self, number: int) -> Callable[[], None]:
        wish = {"path": "/workspace/many", "pattern": "line", "max_matches": 1_000_000}
        return self.asking(number, "POST", "/files/grep", json.dumps(wish).encode())

    def uploads(self, number: int) -> Callable[[], None]:
        packed = io.BytesIO()
        with tarfile.open(fileobj=packed, mode="w") as made:
            for name in range(500):
                info = tarfile.TarInfo(f"up/{name}")
                info.size = 2000
                made.addfile(info, io.BytesIO(bytes(2000)))
        return self.asking(number, "PUT", "/tar?path=/workspace", packed.getvalue())

    def large_json(self, number: int) -> Callable[[], None]:
        """As many values as a request below every bound can have."""
        body = b'{"argv": [' + b'"",' * 340_000 + b'""], "command": "true"}'
        return self.asking(number, "POST", "/exec", body)

    def connections(self, number: int) -> Callable[[], None]:
        """A new connection for each request, and a few that say nothing."""
        silent: list[socket.socket] = []

        def ask() -> None:
            self.asking(number, "GET", "/v1/sandboxes")()
            if len(silent) < 20:
                sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
                sock.connect(self.socket)
                silent.append(sock)

        return ask

    def handshakes(self, number: int) -> Callable[[], None]:
        """TLS by strangers, each from an address of its own."""
        context = ssl.create_default_context(cadata=self.settings["ca"])
        context.set_alpn_protocols(["h2"])

        def shake() -> None:
            sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
            sock.settimeout(30)
            sock.bind((f"127.0.0.{2 + number}", 0))
            sock.connect(("127.0.0.1", self.settings["port"]))
            try:
                context.wrap_socket(sock, server_hostname="localhost").close()
            except OSError:
                refused[0] += 1
            finally:
                sock.close()

        return shake

    def streams(self, number: int) -> Callable[[], None]:
        """Calls over TLS with a key each, ten at a time on one connection."""
        key = self.settings["keys"][number]
        client = RawClient(self.settings["port"], self.settings["ca"], NOBODY)

        def call() -> None:
            nonlocal client
            if client.closed or client.stuck:
                client.close()
                client = RawClient(self.settings["port"], self.settings["ca"], NOBODY)
            opened = {client.open("/sandbox.v1.SandboxService/ListSessions", 0, key) for _ in range(10)}
            until = time.monotonic() + 30
            while not opened <= client.ended and not client.closed and time.monotonic() < until:
                client.read(0.2)
            client.ended.clear()

        return call

    def exposed(self, number: int) -> Callable[[], None]:
        """Half of them with the secret of a server inside, half without any."""
        url = self.settings["url"]
        host, _, path = url.removeprefix("http://").partition("/")

        def get() -> None:
            connection = http.client.HTTPConnection(host, timeout=60)
            try:
                connection.request("GET", f"/{path}" if number % 2 else "/x/nobody/")
                answer = connection.getresponse()
                answer.read()
                refused[0] += answer.status >= 500
            finally:
                connection.close()

        return get


def flood(kind: str, settings: dict[str, Any], numbers: list[int], counts: mmap.mmap) -> None:
    """Do it in a thread for each number, without end."""
    made = Flood(settings)

    def one(number: int) -> None:
        act: Callable[[], None] | None = None
        while True:
            try:
                if act is None:
                    act = getattr(made, kind)(number)
                act()
                done[0] += 1
            except (OSError, http.client.HTTPException):
                refused[0] += 1
                act = None
                time.sleep(random.random() / 20)
            COUNTS.pack_into(counts, 0, done[0], refused[0])

    for number in numbers:
        threading.Thread(target=one, args=(number,), daemon=True).start()
    threading.Event().wait()


def open_counts(settings: str, share: int) -> mmap.mmap:
    """The place where a flood writes what it has done; made by who starts it."""
    with open(f"{settings}.{share}", "r+b") as file:
        return mmap.mmap(file.fileno(), COUNTS.size)


if __name__ == "__main__":
    os.nice(0)
    given = json.loads(Path(sys.argv[2]).read_text())
    share, of = int(sys.argv[3]), int(sys.argv[4])
    numbers = list(range(share, len(given["sandboxes"]), of))
    flood(sys.argv[1], given, numbers, open_counts(sys.argv[2], share))
