"""A way to a daemon on which one answer is lost."""

import socket
import threading
from contextlib import suppress
from pathlib import Path


class LossyProxy:
    """Passes connections on to a Unix socket. The answer to the first request that has `mark` in it is lost."""

    def __init__(self, path: Path, target: str, mark: bytes, done: threading.Event) -> None:
        self._target, self._mark, self._done = target, mark, done
        self._lost = False
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen()
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._listener.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                server = socket.socket(socket.AF_UNIX)
                server.connect(self._target)
                muted = threading.Event()
                threading.Thread(target=self._forward, args=(client, server, muted), daemon=True).start()
                threading.Thread(target=self._answer, args=(server, client, muted), daemon=True).start()

    def _forward(self, client: socket.socket, server: socket.socket, muted: threading.Event) -> None:
        with suppress(OSError):
            while data := client.recv(65536):
                if self._mark in data and not self._lost:
                    self._lost = True
                    muted.set()
                    server.sendall(data)
                    self._done.wait(90)
                    client.shutdown(socket.SHUT_RDWR)
                    return
                server.sendall(data)

    def _answer(self, server: socket.socket, client: socket.socket, muted: threading.Event) -> None:
        with suppress(OSError):
            while data := server.recv(65536):
                if not muted.is_set():
                    client.sendall(data)
