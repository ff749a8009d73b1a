"""A gRPC client by hand: HTTP/2 frames on a TLS socket, so that a call can stop in the middle of anything."""

import os
import select
import socket
import ssl
import struct
import time
from contextlib import suppress

DATA, HEADERS, RST_STREAM, SETTINGS, PING, GOAWAY, WINDOW_UPDATE = 0, 1, 3, 4, 6, 7, 8
END_STREAM, END_HEADERS, ACK, PADDED = 1, 4, 1, 8
NOBODY = 65534


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    return len(payload).to_bytes(3, "big") + bytes((kind, flags)) + stream.to_bytes(4, "big") + payload


def headers(path: str, key: str = "") -> bytes:
    """A block of literal header fields that are not indexed."""
    fields = [(":method", "POST"), (":scheme", "https"), (":path", path), (":authority", "localhost")]
    fields += [("content-type", "application/grpc"), ("te", "trailers")]
    if key:
        fields.append(("authorization", f"Bearer {key}"))
    block = b""
    for name, value in fields:
        block += b"\0"
        for text in (name.encode(), value.encode()):
            size = len(text)
            block += bytes((size,)) if size < 127 else bytes((127, (size - 127) & 127))
            assert size < 127 + 128
            block += text
    return block


def dial(port: int, uid: int = NOBODY) -> socket.socket:
    """A TCP connection to loopback which belongs to `uid`, so that the daemon does not take it for its own user's."""
    if os.geteuid() == 0 and uid:
        os.seteuid(uid)
    try:
        sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    finally:
        if os.getuid() == 0:
            os.seteuid(0)
    sock.settimeout(30)
    sock.connect(("127.0.0.1", port))
    return sock


class RawClient:
    """One connection. `streams` has how each call ended: a trailer's block, or RST_STREAM's code."""

    def __init__(self, port: int, ca: str, uid: int = NOBODY) -> None:
        context = ssl.create_default_context(cadata=ca)
        context.set_alpn_protocols(["h2"])
        self.sock = context.wrap_socket(dial(port, uid), server_hostname="localhost")
        self.windows: dict[int, int] = {}
        self.room = 65535
        self.initial = 65535
        self.ended: set[int] = set()
        self.closed = False
        self.stuck = False
        self._next = 1
        self._came = b""
        self.sock.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(SETTINGS, 0, 0))
        self.sock.setblocking(False)

    def open(self, path: str, size: int, key: str = "") -> int:
        """Begin a call with a message of so many bytes, and send none of them."""
        stream, self._next = self._next, self._next + 2
        self.windows[stream] = self.initial - 5
        self.room -= 5
        self.write(frame(HEADERS, END_HEADERS, stream, headers(path, key)))
        self.write(frame(DATA, 0, stream, b"\0" + struct.pack("!I", size)))
        return stream

    def send(self, stream: int, size: int) -> int:
        """As much of `size` bytes as the server has room for; how much that was."""
        self.read()
        take = min(size, 16384, self.windows.get(stream, 0), self.room)
        if take <= 0 or stream in self.ended or self.closed or self.stuck:
            return 0
        self.windows[stream] -= take
        self.room -= take
        self.write(frame(DATA, 0, stream, bytes(take)))
        return take

    def write(self, data: bytes) -> None:
        view, until = memoryview(data), time.monotonic() + 2
        while view and not self.closed and not self.stuck:
            try:
                view = view[self.sock.send(view) :]
            except (ssl.SSLWantWriteError, ssl.SSLWantReadError, BlockingIOError):
                self.read(0.05)
                if time.monotonic() > until:
                    self.stuck = True  # the server takes no more
                    return
            except OSError:
                self.closed = True

    def read(self, patience: float = 0.0) -> None:
        """Take what the server has sent."""
        if patience:
            select.select([self.sock], [], [], patience)
        while not self.closed:
            try:
                data = self.sock.recv(65536)
            except (ssl.SSLWantReadError, ssl.SSLWantWriteError, BlockingIOError):
                break
            except OSError:
                data = b""
            if not data:
                self.closed = True
                break
            self._came += data
        while len(self._came) >= 9:
            length, kind, flags = int.from_bytes(self._came[:3], "big"), self._came[3], self._came[4]
            stream = int.from_bytes(self._came[5:9], "big")
            if len(self._came) < 9 + length:
                break
            payload, self._came = self._came[9 : 9 + length], self._came[9 + length :]
            self._take(kind, flags, stream, payload)

    def _take(self, kind: int, flags: int, stream: int, payload: bytes) -> None:
        if kind == SETTINGS and not flags & ACK:
            for at in range(0, len(payload), 6):
                if payload[at : at + 2] == b"\0\4":
                    fresh = int.from_bytes(payload[at + 2 : at + 6], "big")
                    self.windows = {s: w + fresh - self.initial for s, w in self.windows.items()}
                    self.initial = fresh
            self.write(frame(SETTINGS, ACK, 0))
        elif kind == PING and not flags & ACK:
            self.write(frame(PING, ACK, 0, payload))
        elif kind == WINDOW_UPDATE:
            if stream:
                self.windows[stream] = self.windows.get(stream, 0) + int.from_bytes(payload, "big")
            else:
                self.room += int.from_bytes(payload, "big")
        elif kind == GOAWAY:
            self.closed = True
        elif kind == RST_STREAM or (kind in (HEADERS, DATA) and flags & END_STREAM):
            self.ended.add(stream)

    def close(self) -> None:
        with suppress(OSError):
            self.sock.close()


def pour(clients: list[RawClient], path: str, streams: int, size: int, key: str = "") -> int:
    """Open calls with messages of `size` bytes on each connection and send all but the last byte; what was sent."""
    left = {(c, c.open(path, size, key)): size - 1 for c in clients for _ in range(streams)}
    sent = idle = 0
    while left and idle < 10:
        moved = 0
        for (client, stream), more in list(left.items()):
            took = client.send(stream, more)
            moved += took
            left[client, stream] = more - took
            if client.closed or client.stuck or stream in client.ended or more == took:
                del left[client, stream]
        sent += moved
        if moved:
            idle = 0
        else:
            idle += 1
            for client in clients:
                client.read(0.05 / len(clients))
    return sent
