"""Servers of the fairness tests, each kind in a process of its own: `broker_internet.py NETNS_FD names|near|far ADDRESS`.

`names` is the one name server. `near` is what the neighbour uses: HTTP on 8081. `far` is what floods reach: sinks on 7070 and
7072, a source without end on 7071, an echo on 7073. So no bytes of a flood slow the neighbour at a server; questions of a flood
reach the name server of all, as they would elsewhere, and the broker has to bound them.
"""

import asyncio
import ctypes
import socket
import struct
import sys

TARGETS = {b"near": "203.0.113.61", b"flood": "203.0.113.62"}
RESPONSE = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"


class Dns(asyncio.DatagramProtocol):
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport

    def datagram_received(self, data: bytes, addr: object) -> None:
        at, labels = 12, []
        while data[at]:
            labels.append(data[at + 1 : at + 1 + data[at]].lower())
            at += 1 + data[at]
        record = b"\xc0\x0c" + struct.pack("!HHIH", 1, 1, 30, 4) + socket.inet_aton(TARGETS[labels[-2]])
        kind = struct.unpack_from("!H", data, at + 1)[0]
        count, record = (1, record) if kind == 1 else (0, b"")
        answer = data[:2] + struct.pack("!5H", 0x8180, 1, count, 0, 0) + data[12 : at + 5] + record
        self.transport.sendto(answer, addr)  # type: ignore[attr-defined]


class Http(asyncio.Protocol):
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        if data.endswith(b"\r\n\r\n"):
            self.transport.write(RESPONSE)  # type: ignore[attr-defined]


class Sink(asyncio.Protocol):
    """Takes everything."""


class Source(asyncio.Protocol):
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport
        self.resume_writing()

    def resume_writing(self) -> None:
        self.transport.write(bytes(1 << 18))  # type: ignore[attr-defined]
        if not self.transport.is_closing() and self.transport.get_write_buffer_size() < 65536:  # type: ignore[attr-defined]
            asyncio.get_running_loop().call_soon(self.resume_writing)


class Echo(asyncio.Protocol):
    """Reads no more while the other side does not take what it sent."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self.transport.write(data)  # type: ignore[attr-defined]

    def pause_writing(self) -> None:
        self.transport.pause_reading()  # type: ignore[attr-defined]

    def resume_writing(self) -> None:
        self.transport.resume_reading()  # type: ignore[attr-defined]


PORTS: dict[str, dict[int, type[asyncio.Protocol]]] = {
    "names": {},
    "near": {8081: Http},
    "far": {7070: Sink, 7071: Source, 7072: Sink, 7073: Echo},
}


async def main(kind: str, address: str) -> None:
    loop = asyncio.get_running_loop()
    if kind == "names":
        await loop.create_datagram_endpoint(Dns, (address, 53))
    for port, made in PORTS[kind].items():
        await loop.create_server(made, "0.0.0.0", port, backlog=4096)
    print("ready", flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    if ctypes.CDLL(None).setns(int(sys.argv[1]), 0x40000000) != 0:
        raise SystemExit("setns")
    asyncio.run(main(sys.argv[2], sys.argv[3]))
