"""A whole network for the egress tests, made of namespaces of their own: nothing of the machine's network is touched.

`inet` answers for every address there is (so that any dial would be noticed), `host` is where the broker dials from, and
each sandbox is a namespace of its own. Sockets belong to the namespace they were opened in, so a test acts "inside" a
sandbox by opening sockets there.
"""

import asyncio
import contextlib
import datetime
import ipaddress
import os
import queue
import resource
import socket
import ssl
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from atoll.egress import Egress, EgressEvent, EgressPolicy, Link
from atoll.egress.router.netlink import Netlink, current_net, enter_net, unshare_net, write_sysctl

BROKER_UID = 64321
DNS_SERVER = "203.0.113.53"
HOST_ADDRESS = "192.0.2.1"
PATIENCE = 60.0
T = TypeVar("T")


def in_thread(work: Callable[[], T]) -> T:
    """Run in a thread that is thrown away, so that a change of namespace stays there."""
    box: list[Any] = []

    def run() -> None:
        try:
            box.append((True, work()))
        except BaseException as err:
            box.append((False, err))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    ok, value = box[0]
    if not ok:
        raise value
    return value


def new_net() -> int:
    def make() -> int:
        unshare_net()
        with Netlink() as netlink:
            netlink.set_up(socket.if_nametoindex("lo"))
        return current_net()

    return in_thread(make)


def in_net(fd: int, work: Callable[[], T]) -> T:
    """Run in that namespace, in a thread that is thrown away: without root there is no way back from it."""

    def go() -> T:
        enter_net(fd)
        return work()

    return in_thread(go)


def wait_for(what: str, check: Callable[[], T | bool | None]) -> T:
    """Poll until `check` gives something true."""
    deadline = time.monotonic() + PATIENCE
    while True:
        found = check()
        if found:
            return found  # type: ignore[return-value]
        if time.monotonic() > deadline:
            raise AssertionError(f"in {PATIENCE:.0f} s: no {what}")
        time.sleep(0.02)


class Internet:
    """Servers in the `inet` namespace, and a record of all they were asked."""

    def __init__(self, net: int, directory: Path) -> None:
        self.net = net
        self.records: dict[str, list[str]] = {}
        self.queries: list[str] = []
        self.dialled: list[tuple[str, int]] = []
        self.names_sent: list[tuple[str, str]] = []
        self.requests: list[tuple[str, str]] = []
        self.udp_seen: list[tuple[str, int]] = []
        self.taken: dict[str, queue.Queue[socket.socket]] = {}
        self.ttl = 30
        self.held: list[bytes] = []
        self.hold_answers = threading.Event()
        self.hold_answers.set()
        self._sockets: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self._context, self.ca = make_tls(directory)
        self._dns()
        self._serve(443, self._tls)
        self._serve(80, self._http)
        self._serve(22, self._banner)
        for port in (8443, 5432):
            self._serve(port, self._echo)
        self._serve(9000, self._flood)

    def close(self) -> None:
        for sock in self._sockets:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()

    def _open(self, kind: int, port: int, address: str = "0.0.0.0") -> socket.socket:
        def make() -> socket.socket:
            sock = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, kind)
            if ":" in address:
                sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind((address, port))
            if kind == socket.SOCK_STREAM:
                sock.listen(2048)
            return sock

        sock = in_net(self.net, make)
        self._sockets.append(sock)
        return sock

    def take(self, address: str) -> "queue.Queue[socket.socket]":
        """From now on connections to this address are the test's own to serve."""
        return self.taken.setdefault(address, queue.Queue())

    def _background(self, work: Callable[..., None], *args: Any) -> None:
        threading.Thread(target=work, args=args, daemon=True).start()

    def _serve(self, port: int, handle: Callable[[socket.socket], None]) -> None:
        listeners = [self._open(socket.SOCK_STREAM, port)]
        with contextlib.suppress(OSError):  # a machine without IPv6
            listeners.append(self._open(socket.SOCK_STREAM, port, "::"))

        def accept(listener: socket.socket) -> None:
            while True:
                try:
                    conn, _ = listener.accept()
                except OSError:
                    return
                self.dialled.append(conn.getsockname()[:2])
                conn.settimeout(PATIENCE)
                taken = self.taken.get(conn.getsockname()[0])
                if taken is not None:
                    taken.put(conn)
                else:
                    self._background(guard, conn)

        def guard(conn: socket.socket) -> None:
            with contextlib.suppress(OSError, ssl.SSLError, ValueError), conn:
                handle(conn)

        for listener in listeners:
            self._background(accept, listener)

    def _tls(self, conn: socket.socket) -> None:
        sent: list[str] = []
        context = self._context()
        context.sni_callback = lambda _sock, name, _ctx: sent.append(name or "")
        with context.wrap_socket(conn, server_side=True) as tls:
            self.names_sent.append((tls.getsockname()[0], sent[0] if sent else ""))
            while data := tls.recv(65536):
                tls.sendall(b"tls:" + data)

    def _http(self, conn: socket.socket) -> None:
        stream = conn.makefile("rb")
        while line := stream.readline():
            host, length, upgrade = "", 0, False
            while (field := stream.readline().strip()) != b"":
                name, _, value = field.partition(b":")
                if name.lower() == b"host":
                    host = value.strip().decode()
                length = int(value) if name.lower() == b"content-length" else length
                upgrade = upgrade or name.lower() == b"upgrade"
            stream.read(length)
            self.requests.append((line.decode().strip(), host))
            if upgrade and b"/ws" in line:
                conn.sendall(b"HTTP/1.1 101 Switching Protocols\r\n\r\n")
                while data := conn.recv(4096):
                    conn.sendall(b"ws:" + data)
                return
            body = b"hello from " + host.encode()
            conn.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))

    def _banner(self, conn: socket.socket) -> None:
        conn.sendall(b"SSH-2.0-test\r\n")
        conn.recv(1024)

    def _echo(self, conn: socket.socket) -> None:
        while data := conn.recv(65536):
            conn.sendall(data)

    def _flood(self, conn: socket.socket) -> None:
        """First line: how many bytes to send."""
        wanted = int(conn.makefile("rb").readline())
        block = bytes(1 << 20)
        while wanted > 0:
            conn.sendall(block[: min(wanted, len(block))])
            wanted -= len(block)

    def _dns(self) -> None:
        udp = self._open(socket.SOCK_DGRAM, 53, DNS_SERVER)
        others = self._open(socket.SOCK_DGRAM, 443)
        tcp = self._open(socket.SOCK_STREAM, 53, DNS_SERVER)

        def serve() -> None:
            while True:
                try:
                    packet, peer = udp.recvfrom(4096)
                except OSError:
                    return
                if not packet:
                    return
                if not self.hold_answers.is_set():
                    self.held.append(packet)
                    self.hold_answers.wait(PATIENCE)
                with contextlib.suppress(OSError):
                    udp.sendto(self.answer(packet), peer)

        def serve_tcp() -> None:
            while True:
                try:
                    conn, _ = tcp.accept()
                    with conn:
                        (size,) = struct.unpack("!H", conn.recv(2))
                        reply = self.answer(conn.recv(size), over_tcp=True)
                        conn.sendall(struct.pack("!H", len(reply)) + reply)
                except (OSError, struct.error):
                    if tcp.fileno() < 0:
                        return

        def watch() -> None:
            while True:
                try:
                    _, peer = others.recvfrom(4096)
                except OSError:
                    return
                self.udp_seen.append(peer)

        for work in (serve, serve_tcp, watch):
            self._background(work)

    def answer(self, packet: bytes, *, over_tcp: bool = False) -> bytes:
        at, labels = 12, []
        while packet[at]:
            labels.append(packet[at + 1 : at + 1 + packet[at]])
            at += 1 + packet[at]
        question = packet[12 : at + 5]
        name = b".".join(labels).decode().lower()
        self.queries.append(name)
        found = self.records.get(name)
        if found is None:
            return packet[:2] + struct.pack("!5H", 0x8183, 1, 0, 0, 0) + question
        if found and found[0] == "tcp-only" and not over_tcp:
            return packet[:2] + struct.pack("!5H", 0x8380, 1, 0, 0, 0) + question
        (kind,) = struct.unpack_from("!H", packet, at + 1)
        family = {1: socket.AF_INET, 28: socket.AF_INET6}[kind]
        addresses = [entry for entry in found if entry != "tcp-only" and (":" in entry) == (kind == 28)]
        records = b""
        for address in addresses:
            packed = socket.inet_pton(family, address)
            records += b"\xc0\x0c" + struct.pack("!HHIH", kind, 1, self.ttl, len(packed)) + packed
        return packet[:2] + struct.pack("!5H", 0x8180, 1, len(addresses), 0, 0) + question + records


class Inside:
    """A sandbox as the network sees it: a namespace, plugged in, with a stub resolver."""

    def __init__(self, world: "World", name: str, net: int, link: Link | None) -> None:
        self.world, self.name, self.net, self._link = world, name, net, link

    @property
    def link(self) -> Link:
        assert self._link is not None
        return self._link

    def open(self, kind: int = socket.SOCK_STREAM, proto: int = 0, family: int = socket.AF_INET) -> socket.socket:
        sock = in_net(self.net, lambda: socket.socket(family, kind, proto))
        sock.settimeout(PATIENCE)
        return sock

    def ask(
        self, name: str | bytes, kind: int = 1, *, server: str | None = None, tcp: bool = False
    ) -> tuple[int, list[str]]:
        raw = name.encode() if isinstance(name, str) else name
        packet = dns_query(raw, kind)
        reply = self.send_dns(packet, server=server, tcp=tcp)
        assert reply[:2] == packet[:2]
        count = struct.unpack("!H", reply[6:8])[0]
        addresses = [socket.inet_ntoa(reply[len(reply) - 16 * i - 4 : len(reply) - 16 * i]) for i in range(count)]
        return reply[3] & 15, addresses[::-1]

    def send_dns(self, packet: bytes, *, server: str | None = None, tcp: bool = False) -> bytes:
        target = (server or self.link.gateway, 53)
        if tcp:
            with self.open() as sock:
                sock.connect(target)
                sock.sendall(struct.pack("!H", len(packet)) + packet)
                stream = sock.makefile("rb")
                return stream.read(struct.unpack("!H", stream.read(2))[0])
        deadline = time.monotonic() + PATIENCE
        while True:
            with self.open(socket.SOCK_DGRAM) as sock:
                sock.settimeout(5)
                sock.sendto(packet, target)
                try:
                    return sock.recv(4096)
                except TimeoutError:
                    if time.monotonic() > deadline:
                        raise

    def resolve(self, name: str) -> str:
        def once() -> str | None:
            code, addresses = self.ask(name)
            if code == 2:  # a broker that has just been started has no daemon yet
                return None
            assert code == 0 and addresses, f"{name}: code {code}"
            return addresses[0]

        return wait_for(f"answer for {name}", once)

    def connect(self, host: str, port: int) -> socket.socket:
        address = host if host[0].isdigit() else self.resolve(host)
        sock = self.open()
        try:
            sock.connect((address, port))
        except BaseException:
            sock.close()
            raise
        return sock

    def tls(self, host: str, sni: str | None = None, port: int = 443, address: str | None = None) -> ssl.SSLSocket:
        context = ssl.create_default_context(cadata=self.world.inet.ca)
        context.check_hostname = False
        return context.wrap_socket(self.connect(address or host, port), server_hostname=sni or host)

    def events(self) -> list[EgressEvent]:
        return self.world.egress.events(self.name)

    def event(self, text: str, **fields: Any) -> EgressEvent:
        """Wait for a refusal whose reason contains `text`."""

        def find() -> EgressEvent | None:
            for event in self.events():
                if text in event.reason and all(getattr(event, key) == value for key, value in fields.items()):
                    return event
            return None

        try:
            return wait_for(f"event {text!r} {fields}", find)
        except AssertionError as err:
            raise AssertionError(f"{err}; have {self.events()}") from None

    def update(self, *hosts: str, **more: Any) -> None:
        self.world.call(self.world.egress.update(self.name, EgressPolicy.of(hosts, **more)))

    def counters(self) -> dict[str, Any]:
        return self.world.call(self.world.egress.counters(self.name))


class World:
    """The namespaces, the servers, and one Egress with its loop in a thread."""

    def __init__(self) -> None:
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 65536), hard))
        self._tmp = tempfile.TemporaryDirectory(prefix="atoll-egress-")
        self.directory = Path(self._tmp.name)
        self.directory.chmod(0o711)  # the broker, another user, reads a hosts file in it
        self.host, self.inet_net = new_net(), new_net()
        _join(self.host, self.inet_net)
        self.inet = Internet(self.inet_net, self.directory)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._count = 0
        self.state = self.directory / "state"
        self.egress = self.start_egress()

    def start_egress(self) -> Egress:
        hosts = self.directory / "hosts"
        hosts.write_text("203.0.113.99 from-hosts.example\n127.0.0.1 loop-hosts.example\n")
        return self.call(
            Egress.start(self.state, BROKER_UID, host_net=self.host, servers=[(DNS_SERVER, 53)], hosts_file=str(hosts))
        )

    def call(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(PATIENCE)

    @contextlib.contextmanager
    def sandbox(self, *hosts: str, **more: Any) -> Iterator[Inside]:
        self._count += 1
        name, net = f"box{self._count}-{os.getpid()}", new_net()
        try:
            link = self.call(self.egress.attach(name, net, EgressPolicy.of(hosts, **more)))
            yield Inside(self, name, net, link)
        finally:
            self.call(self.egress.detach(name))
            os.close(net)

    def host_listener(self, address: str = "127.0.0.1") -> socket.socket:
        def make() -> socket.socket:
            sock = socket.create_server((address, 0))
            sock.settimeout(PATIENCE)
            return sock

        return in_net(self.host, make)

    def close(self) -> None:
        self.call(self.egress.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(PATIENCE)
        self.inet.close()
        os.close(self.host)
        os.close(self.inet_net)
        self._tmp.cleanup()


def _join(host: int, inet: int) -> None:
    """A cable between the broker's namespace and the internet, where every address is local."""

    def host_side() -> None:
        with Netlink() as netlink:
            netlink.add_veth("up0", "inet0", inet)
            index = socket.if_nametoindex("up0")
            netlink.add_address(index, HOST_ADDRESS, 30)
            netlink.set_up(index)
            in_net(inet, inet_side)
            netlink.add_default_route(index, "192.0.2.2")
        _ip6("addr add fd00:a7::1/64 dev up0 nodad", "route add default via fd00:a7::2")

    def inet_side() -> None:
        index, loopback = socket.if_nametoindex("inet0"), socket.if_nametoindex("lo")
        with Netlink() as netlink:
            netlink.add_address(index, "192.0.2.2", 30)
            netlink.add_address(loopback, DNS_SERVER, 32)
            netlink.set_up(index)
        for name in ("all", "inet0"):
            write_sysctl(f"ipv4/conf/{name}/rp_filter", "0")
        subprocess.run(["ip", "route", "add", "local", "0.0.0.0/0", "dev", "lo"], check=True)
        _ip6("addr add fd00:a7::2/64 dev inet0 nodad", "route add local 2001:db8::/32 dev lo")

    in_net(host, host_side)


def _ip6(*commands: str) -> None:
    """IPv6 on the cable, where the machine has it."""
    for words in commands:
        subprocess.run(["ip", "-6", *words.split()], capture_output=True)


def dns_query(name: bytes, kind: int = 1, ident: int | None = None) -> bytes:
    labels = b"".join(bytes((len(label),)) + label for label in name.split(b".") if label)
    number = int.from_bytes(os.urandom(2), "big") if ident is None else ident
    return struct.pack("!6H", number, 0x0100, 1, 0, 0, 0) + labels + b"\0" + struct.pack("!HH", kind, 1)


def make_tls(directory: Path) -> tuple[Callable[[], ssl.SSLContext], str]:
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "test internet")])
    now = datetime.datetime.now(datetime.UTC)
    names: list[x509.GeneralName] = [x509.DNSName("*.example"), x509.IPAddress(ipaddress.IPv4Address("203.0.113.10"))]
    cert = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=2))
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    pem = cert.public_bytes(serialization.Encoding.PEM)
    path = directory / "server.pem"
    path.write_bytes(
        pem
        + key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )

    def context() -> ssl.SSLContext:
        made = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        made.load_cert_chain(path)
        return made

    return context, pem.decode()


def can_make_networks() -> bool:
    return os.geteuid() == 0 and sys.platform == "linux"
