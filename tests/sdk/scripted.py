"""A Unix socket server that misbehaves on purpose: each accepted connection is handed to the next script."""

import os
import socket
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Script = Callable[[socket.socket], None]


class Scripted:
    """What the server saw: one entry per request, in order."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.requests: list[bytes] = []
        self.connections = 0
        self.hung_up = threading.Event()  # at least one connection was closed by the server


def read_request(conn: socket.socket) -> bytes:
    """One whole request with a sized or chunked body, or what came before the client hung up."""
    data = b""
    while b"\r\n\r\n" not in data:
        piece = conn.recv(65536)
        if not piece:
            return data
        data += piece
    head, _, body = data.partition(b"\r\n\r\n")
    lower = head.lower()
    if b"transfer-encoding: chunked" in lower:
        while not body.endswith(b"0\r\n\r\n"):
            piece = conn.recv(65536)
            if not piece:
                break
            body += piece
        return head + b"\r\n\r\n" + body
    size = 0
    for line in lower.split(b"\r\n"):
        if line.startswith(b"content-length:"):
            size = int(line.split(b":")[1])
    while len(body) < size:
        piece = conn.recv(65536)
        if not piece:
            break
        body += piece
    return head + b"\r\n\r\n" + body


def answer(body: bytes, status: str = "200 OK", extra: bytes = b"") -> bytes:
    head = f"HTTP/1.1 {status}\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n".encode()
    return head + extra + b"\r\n" + body


@contextmanager
def scripted(*scripts: Script) -> Iterator[Scripted]:
    """Serve each connection with the next script, the last one for all that follow."""
    with tempfile.TemporaryDirectory(prefix="at-") as directory:
        server = socket.socket(socket.AF_UNIX)
        path = os.path.join(directory, "s")
        server.bind(path)
        server.listen(64)
        seen = Scripted(path)

        def serve() -> None:
            while True:
                try:
                    conn, _ = server.accept()
                except OSError:
                    return
                script = scripts[min(seen.connections, len(scripts) - 1)]
                seen.connections += 1
                threading.Thread(target=handle, args=(conn, script), daemon=True).start()

        def handle(conn: socket.socket, script: Script) -> None:
            with conn:
                try:
                    script(conn)
                except OSError:
                    pass
            seen.hung_up.set()

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        try:
            yield seen
        finally:
            server.shutdown(socket.SHUT_RDWR)
            server.close()
            thread.join(30)


def replies(seen_by: list[bytes], *answers: bytes) -> Script:
    """Read a request and send the next answer, on one connection, until the answers are used up; then hang up."""

    def script(conn: socket.socket) -> None:
        for reply in answers:
            request = read_request(conn)
            if not request:
                return
            seen_by.append(request)
            conn.sendall(reply)

    return script
