"""What hostile programs do to the broker, from inside: `broker_floods.py NETNS_FD GATEWAY`.

Each line on stdin names what to do from then on: a flood, `burn` or `stop`; a line on stdout says that it has begun. With a
number, a neighbour's lookups with a GET are measured instead: their times come back, and what went wrong in those that failed.
"""

import contextlib
import ctypes
import itertools
import json
import os
import select
import signal
import socket
import struct
import sys
import time
import traceback
from collections.abc import Callable

NAME, NEAR_NAME = "x.flood.example", "near.example"


def query(name: str, kind: int = 1) -> bytes:
    labels = b"".join(bytes((len(part),)) + part.encode() for part in name.split("."))
    return os.urandom(2) + struct.pack("!5H", 0x0100, 1, 0, 0, 0) + labels + b"\0" + struct.pack("!HH", kind, 1)


def find(gateway: str) -> str:
    """The address that floods are sent to. What the flood before left behind may have to be answered first."""
    return ask(gateway, NAME, tries=60)


def ask(gateway: str, name: str, seconds: float = 5.0, tries: int = 5) -> str:
    """The address of a name, asked as a stub resolver asks."""
    said = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.settimeout(seconds)
        for _ in range(tries):
            sock.sendto(query(name), (gateway, 53))
            try:
                reply = sock.recv(4096)
            except TimeoutError:
                said.append("nothing")
                continue
            if reply[3] & 15 == 0:
                return socket.inet_ntoa(reply[-4:])
            said.append(f"code {reply[3] & 15}")
            time.sleep(0.2)
    raise OSError(f"{name} is not resolved: {', '.join(said)}")


def connect(address: str, port: int, wait: bool = True) -> socket.socket:
    sock = socket.socket()
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setblocking(False)
    sock.connect_ex((address, port))
    if wait:
        select.select([], [sock], [], 5)
    return sock


def keep(address: str, port: int, count: int, start: bytes, piece: Callable[[int], bytes]) -> None:
    """Hold `count` connections open, each begun with `start`, and send pieces on all of them; open anew what is cut."""
    socks: list[socket.socket | None] = [None] * count
    for turn in itertools.count():
        for at, sock in enumerate(socks):
            if sock is None:
                sock = socks[at] = connect(address, port)
                with contextlib.suppress(OSError):
                    sock.send(start)
                continue
            try:
                data = piece(turn)
                if data:
                    sock.send(data)
                with contextlib.suppress(BlockingIOError):
                    if sock.recv(65536) == b"":
                        raise ConnectionResetError
            except BlockingIOError:
                pass
            except OSError:
                sock.close()
                socks[at] = None
        if not piece(0):
            time.sleep(0.05)


def hello(record: int) -> bytes:
    name = NAME.encode()
    sni = struct.pack("!HBH", len(name) + 3, 0, len(name)) + name
    ext = struct.pack("!HH", 0, len(sni)) + sni + struct.pack("!HH", 21, 32000) + bytes(32000)
    body = b"\x03\x03" + bytes(32) + b"\0\0\x02\x13\x01\x01\0" + struct.pack("!H", len(ext)) + ext
    message = b"\x01" + len(body).to_bytes(3, "big") + body
    parts = [message[at : at + record] for at in range(0, len(message), record)]
    return b"".join(b"\x16\x03\x01" + struct.pack("!H", len(part)) + part for part in parts)


def burn(gateway: str) -> None:
    while True:
        pass


def hello_drips(gateway: str) -> None:
    data = hello(64)
    keep(find(gateway), 443, 100, data[:30000], lambda turn: data[30000 + turn % 200 :][:1])


def chunk_drips(gateway: str) -> None:
    start = f"POST /x HTTP/1.1\r\nHost: {NAME}:7070\r\nTransfer-Encoding: chunked\r\n\r\n".encode()
    keep(find(gateway), 7070, 20, start, lambda turn: b"1\r\nx\r\n" * 40)


def dns_packets(gateway: str) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        while True:
            sock.sendto(query(NAME), (gateway, 53))


def dns_names(gateway: str) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        for number in itertools.count():
            sock.sendto(query(f"n{number}.flood.example"), (gateway, 53))


def dns_streams(gateway: str) -> None:
    packet = query(NAME)
    framed = struct.pack("!H", len(packet)) + packet
    keep(gateway, 53, 16, framed, lambda turn: framed[turn % len(framed) :][:1])


def connections(gateway: str) -> None:
    address = find(gateway)
    while True:
        connect(address, 7073).close()


def refusals(gateway: str) -> None:
    """Connections that are refused, each with an event."""
    address = find(gateway)
    for number in itertools.count():
        with connect(address, (443, 80)[number % 2]) as sock, contextlib.suppress(OSError):
            sock.send(b"garbage\r\n\r\n")


def raw_addresses(gateway: str) -> None:
    """Packets that the router refuses and logs."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        for number in itertools.count():
            with contextlib.suppress(OSError):
                sock.sendto(b"x", (f"198.51.100.{number % 250 + 1}", 1000 + number % 1000))
            if number % 10 == 0:
                connect("198.51.100.7", 2000 + number % 1000, wait=False).close()


def uploads(gateway: str) -> None:
    block = bytes(1 << 18)
    keep(find(gateway), 7072, 4, block, lambda turn: block)


def downloads(gateway: str) -> None:
    keep(find(gateway), 7071, 4, b"x", lambda turn: b"x")


def half_open(gateway: str) -> None:
    keep(find(gateway), 443, 1000, b"\x16", lambda turn: b"")


def small_packets(gateway: str) -> None:
    keep(find(gateway), 7073, 50, b"x", lambda turn: b"x")


FLOODS: dict[str, Callable[[str], None]] = {
    work.__name__: work
    for work in (
        hello_drips, chunk_drips, dns_packets, dns_streams, dns_names, connections, refusals, raw_addresses, uploads,
        downloads, half_open, small_packets,
    )
}  # fmt: skip


def fetch(gateway: str) -> list[float]:
    """Do one lookup and one GET of the neighbour's; the times at the start and after lookup, connect and answer."""
    times = [time.monotonic()]
    address = ask(gateway, NEAR_NAME)
    times.append(time.monotonic())
    with socket.create_connection((address, 8081), 20) as sock:
        times.append(time.monotonic())
        sock.sendall(f"GET /x HTTP/1.1\r\nHost: {NEAR_NAME}:8081\r\n\r\n".encode())
        if not sock.recv(1000).startswith(b"HTTP/1.1 200"):
            raise OSError("no answer")
        times.append(time.monotonic())
    return times


def measure(gateway: str, count: int) -> dict[str, list[object]]:
    """Seconds of a lookup with a GET, some times, in all and for each step. One that failed has a time too, and says why."""
    found: dict[str, list[object]] = {"took": [], "steps": [], "failed": []}
    for _ in range(count):
        time.sleep(0.02)
        start = time.monotonic()
        try:
            times = fetch(gateway)
            found["steps"].append([after - before for before, after in itertools.pairwise(times)])
        except OSError as err:
            found["failed"].append(f"{type(err).__name__}: {err}")
        found["took"].append(time.monotonic() - start)
    return found


def run_apart(kind: str, gateway: str) -> int:
    """Begin a flood in a child process; its id."""
    pid = os.fork()
    if pid == 0:
        try:
            (burn if kind == "burn" else FLOODS[kind])(gateway)
        except Exception:
            traceback.print_exc()
        finally:
            os._exit(1)
    return pid


def main() -> None:
    fd, gateway = int(sys.argv[1]), sys.argv[2]
    if ctypes.CDLL(None).setns(fd, 0x40000000) != 0:
        raise SystemExit("setns")
    child = 0
    try:
        for line in sys.stdin:
            word, said = line.strip(), "begun"
            if child:
                os.kill(child, signal.SIGKILL)
                if not os.WIFSIGNALED(os.waitpid(child, 0)[1]):
                    said = "a flood ended by itself"
                child = 0
            if word.isdigit():
                print(json.dumps(measure(gateway, int(word))), flush=True)
                continue
            if word != "stop":
                child = run_apart(word, gateway)
            print(said, flush=True)
    finally:
        if child:
            os.kill(child, signal.SIGKILL)


if __name__ == "__main__":
    main()
