"""One TLS port: ALPN chooses between gRPC and REST, and REST knows, bounds and refuses its callers as gRPC does."""

import asyncio
import contextlib
import json
import os
import socket
import ssl
import threading
from pathlib import Path

import pytest
import uvloop

from atoll import accounts, errors
from atoll.client import calls
from atoll.client._async.secure import AsyncRemoteLink
from atoll.client._async.tunnel import upgrade
from atoll.client._sync.secure import RemoteLink
from atoll.core.access.audited_verbs import SOURCE
from atoll.server import rest_over_tls, visits
from atoll.server.request import Exchange
from atoll.surfaces.k8e.grpc.gateway import Gateway
from atoll.surfaces.k8e.grpc.server import Service, start

from .mirror import SERVICE
from .test_doors import ME, House, bearer, gone, whoami

pytestmark = pytest.mark.filterwarnings('ignore:Overriding the "event_loop_policy" fixture')


@pytest.fixture
def event_loop_policy() -> asyncio.AbstractEventLoopPolicy:
    return uvloop.EventLoopPolicy()


class App:
    """Says who called and from where; streams for ever on demand."""

    def __init__(self) -> None:
        self.begun, self.go_on, self.ended = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self.served = 0

    async def __call__(self, scope, receive, send) -> None:
        self.served += 1
        who = scope["state"]["principal"]
        if scope["type"] == "websocket":
            await receive()
            await send({"type": "websocket.accept"})
            try:
                while (message := await receive())["type"] == "websocket.receive":
                    await send({"type": "websocket.send", "bytes": message["bytes"].upper()})
            finally:
                self.ended.set()
            return
        exchange = Exchange(scope, receive, send, who, [])
        if scope["raw_path"] == b"/v1/stream":
            await exchange.start(200, [(b"content-type", b"application/octet-stream")])
            await exchange.while_connected(self._flood(exchange))
        if scope["raw_path"] == b"/v1/slow":
            self.begun.set()
            await self.go_on.wait()
        body = await exchange.body()
        await exchange.answer({"who": who.owner, "source": SOURCE.get(), "size": len(body)})

    async def _flood(self, exchange: Exchange) -> None:
        try:
            while True:
                await exchange.write(b"x" * 65536)
                await asyncio.sleep(0)
        finally:
            self.ended.set()


class TlsHouse(House):
    async def open(self, listen=(("127.0.0.1", 0),), books: accounts.Accounts | None = None) -> None:
        service = Service(SERVICE, self.mirror, {"Call": "write"})

        async def starter(doors, keeper, authority):
            return await start(doors, [service], keeper, lambda *seen: self.seen.append(seen))

        self.app = App()
        self.running = Gateway(self.home, self.keeper, self.authority, starter, books, self.app)
        await self.running.open_tcp(listen)
        await self.running.open_unix()
        self.endpoint = f"127.0.0.1:{self.running.port}"

    async def connect(self, *protocols: str, pair: Path | None = None):
        context = ssl.create_default_context(cadata=self.authority.ca_pem)
        if protocols:
            context.set_alpn_protocols(list(protocols))
        if pair is not None:
            context.load_cert_chain(pair)
        return await asyncio.open_connection("127.0.0.1", self.running.port, ssl=context, server_hostname="localhost")

    async def ask(self, *lines: str, target="/v1/x", method="GET", body=b"", protocols=("http/1.1",), pair=None):
        reader, writer = await self.connect(*protocols, pair=pair)
        try:
            writer.write(head(method, target, *lines, f"Content-Length: {len(body)}") + body)
            return await answer(reader)
        finally:
            writer.close()

    def link(self, key: str) -> AsyncRemoteLink:
        return AsyncRemoteLink(self.endpoint, api_key=key, ca_cert=str(self.authority.directory / "sandbox-ca.crt"))


def head(method: str, target: str, *lines: str) -> bytes:
    lines = lines if any(line.startswith("Host:") for line in lines) else ("Host: localhost", *lines)
    return "\r\n".join([f"{method} {target} HTTP/1.1", *lines, "", ""]).encode()


async def answer(reader: asyncio.StreamReader):
    async with asyncio.timeout(60):
        first = await reader.readuntil(b"\r\n\r\n")
        size = int(first.lower().partition(b"content-length: ")[2].split(b"\r\n")[0])
        return int(first.split()[1]), json.loads(await reader.readexactly(size))


def authorization(key: str) -> str:
    return f"Authorization: Bearer {key}"


@pytest.fixture
async def house(tmp_path: Path):
    made = TlsHouse(tmp_path)
    await made.open()
    yield made
    await made.running.close(0)
    made.keys.close()


async def test_alpn_chooses_grpc_or_rest_on_one_port(house: TlsHouse) -> None:
    made = house.keys.create("ci")
    assert await whoami(house.channel(), bearer(made.secret)) == "key:ci"
    for protocols in ((), ("http/1.1",), ("h2", "http/1.1"), ("http/1.1", "h2"), ("spdy/1",)):
        status, found = await house.ask(authorization(made.secret), protocols=protocols)
        assert (status, found["who"]) == (200, "key:ci"), protocols
        assert found["source"].startswith("https 127.0.0.1:")
    _, writer = await house.connect("h2", "http/1.1")
    assert writer.get_extra_info("ssl_object").selected_alpn_protocol() == "http/1.1"
    writer.close()


async def test_who_calls_by_key_certificate_or_socket(house: TlsHouse, tmp_path: Path) -> None:
    made, e2b = house.keys.create("ci"), house.keys.create("other").e2b
    (key, cert), finger = house.pair("ci")
    pair = tmp_path / "pair.pem"
    pair.write_bytes(key + cert)
    assert (await house.ask())[1]["who"] == ME
    assert (await house.ask(authorization(made.secret)))[1]["who"] == "key:ci"
    assert (await house.ask(authorization(e2b)))[1]["who"] == "key:other"
    assert (await house.ask(pair=pair))[1]["who"] == "key:ci"
    assert (await house.ask(authorization(e2b), pair=pair))[1]["who"] == "key:other"
    house.authority.revoke(finger)
    assert (await house.ask(pair=pair))[0] == 403


@pytest.mark.parametrize("value", ["Bearer x", "Bearer", "Basic abc", "", "Bearer " + "f" * 4000])
async def test_a_wrong_key_is_never_ignored(house: TlsHouse, value: str) -> None:
    status, found = await house.ask(f"Authorization: {value}")
    assert (status, found["error"]["code"]) == (401, "unauthenticated")
    assert house.app.served == 0


async def test_two_authorizations_are_refused(house: TlsHouse) -> None:
    made = house.keys.create("ci")
    assert (await house.ask(authorization(made.secret), authorization(made.secret)))[0] == 401


@pytest.mark.parametrize(
    "lines",
    [("Host: evil.example",), ("Origin: https://evil.example",), ("Origin: null",), ("Sec-Fetch-Site: cross-site",),
     ("Content-Type: text/plain",), ("Content-Type: application/x-www-form-urlencoded",)],
)  # fmt: skip
async def test_web_pages_are_refused(house: TlsHouse, lines: tuple[str, ...]) -> None:
    """A page that reaches loopback has the rights of its browser's user, unless it is refused."""
    status, found = await house.ask(*lines, method="POST", body=b"{}")
    assert status in (400, 403) and found["error"]["code"] in ("invalid_argument", "permission_denied")
    assert house.app.served == 0
    made = house.keys.create("ci")
    if lines[0].startswith(("Host:", "Content-Type:")):
        assert (await house.ask(*lines, authorization(made.secret), method="POST", body=b"{}"))[0] == 200


async def test_rates_count_reads_and_writes(house: TlsHouse) -> None:
    tight = house.keys.create("tight", quotas={"write_burst": 1, "write_rate": 0.001})
    assert (await house.ask(authorization(tight.secret), method="POST"))[0] == 200
    status, found = await house.ask(authorization(tight.secret), method="POST")
    assert (status, found["error"]["code"]) == (429, "rate_limited")
    assert (await house.ask(authorization(tight.secret)))[0] == 200
    for _ in range(100):
        assert (await house.ask(method="POST"))[0] == 200  # the local user has no rate


async def test_revocation_counts_for_the_next_request(house: TlsHouse) -> None:
    """What is open ends too: `tests/threats/control/test_revoked_key.py`."""
    made = house.keys.create("ci")
    reader, writer = await house.connect("http/1.1")
    writer.write(head("GET", "/v1/x", authorization(made.secret)))
    assert (await answer(reader))[0] == 200
    house.keys.revoke("ci")
    writer.write(head("GET", "/v1/x", authorization(made.secret)))
    assert (await answer(reader))[0] == 401
    writer.close()
    await gone(house)


async def test_a_request_behind_another_is_not_served_after_its_key_is_gone(house: TlsHouse) -> None:
    made = house.keys.create("ci")
    reader, writer = await house.connect("http/1.1")
    first = head("GET", "/v1/slow", authorization(made.secret))
    writer.write(first + head("GET", "/v1/x", authorization(made.secret)))
    await asyncio.wait_for(house.app.begun.wait(), 60)
    house.keys.revoke("ci")
    await asyncio.sleep(rest_over_tls.STALE_SECONDS + 0.2)
    house.app.go_on.set()
    assert [(await answer(reader))[0] for _ in range(2)] == [200, 401]
    writer.close()


async def test_a_websocket_works_and_gives_its_place_back(house: TlsHouse) -> None:
    made = house.keys.create("ci")
    link = house.link(made.secret)
    tunnel = await upgrade(link, "/v1/any")
    await tunnel.send(b"abc")
    assert await tunnel.recv() == b"ABC"
    assert house.running.doors.connections == 1
    await tunnel.close()
    await gone(house)
    assert house.app.ended.is_set()
    house.keys.revoke("ci")
    with pytest.raises(errors.Unauthenticated):
        await upgrade(link, "/v1/any")


async def test_strangers_are_bounded(house: TlsHouse, monkeypatch: pytest.MonkeyPatch) -> None:
    """In calls, bytes and seconds; the connection of a caller that is known is not."""
    wrong = authorization("0" * 64)
    monkeypatch.setattr(house.keeper, "_users", frozenset())  # so that nobody is known by its socket
    reader, writer = await house.connect("http/1.1")
    for _ in range(visits.STRANGER_CALLS - 1):
        writer.write(head("GET", "/v1/x", wrong))
        assert (await answer(reader))[0] == 401
    writer.write(head("GET", "/v1/x", wrong))
    with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
        await answer(reader)
    writer.close()

    reader, writer = await house.connect("http/1.1")
    writer.write(head("PUT", "/v1/x", wrong, "Content-Length: 100000000"))
    assert (await answer(reader))[0] == 401
    writer.transport.set_write_buffer_limits(0)
    with pytest.raises((TimeoutError, ConnectionError)):
        async with asyncio.timeout(3):
            for _ in range(400):
                writer.write(b"x" * 65536)
                await writer.drain()
    writer.transport.abort()

    monkeypatch.setattr(visits, "STRANGER_SECONDS", 1.0)
    reader, writer = await house.connect("http/1.1")
    with contextlib.suppress(ConnectionError):
        assert await asyncio.wait_for(reader.read(), 60) == b""
    writer.close()
    made = house.keys.create("ci")
    reader, writer = await house.connect("http/1.1")
    writer.write(head("PUT", "/v1/x", authorization(made.secret), "Content-Length: 1000000"))
    await asyncio.sleep(1.6)
    writer.write(bytes(1_000_000))
    assert (await answer(reader))[1]["size"] == 1_000_000
    writer.close()
    await gone(house)
    assert house.running.doors.visits.strangers == 0


async def test_connections_and_bodies_are_charged_to_their_owner(tmp_path: Path) -> None:
    house = TlsHouse(tmp_path)
    await house.open(books=accounts.Accounts({"owner": {"memory": 1 << 20, "connections": 2}}))
    try:
        made = house.keys.create("ci")
        house.keeper._users = frozenset()
        status, found = await house.ask(authorization(made.secret), method="PUT", body=bytes(2 << 20))
        assert status == 429 or found["error"]["code"] == "exhausted", found
        books, owner = house.running.doors.books, accounts.owner("key:ci")
        pairs = []
        for _ in range(2):
            reader, writer = await house.connect("http/1.1")
            writer.write(head("GET", "/v1/x", authorization(made.secret)))
            assert (await answer(reader))[0] == 200
            pairs.append(writer)
        assert books.held(accounts.CONNECTIONS, owner) == 2
        with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
            await house.ask(authorization(made.secret))
        for writer in pairs:
            writer.close()
        await gone(house)
        assert books.held(accounts.CONNECTIONS, owner) == books.held(accounts.MEMORY, owner) == 0
    finally:
        await house.running.close(0)
        house.keys.close()


async def test_an_answer_that_nobody_takes_ends(house: TlsHouse, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rest_over_tls, "STALL_SECONDS", 0.3)
    _, writer = await house.connect("http/1.1")
    writer.transport.pause_reading()
    writer.write(head("GET", "/v1/stream"))
    await asyncio.wait_for(house.app.ended.wait(), 60)
    await gone(house)
    writer.transport.abort()


async def test_the_driver_keeps_its_connection(house: TlsHouse) -> None:
    link = house.link(house.keys.create("ci").secret)
    for size in (10, 3_000_000):
        call = calls.Call("PUT", "/v1/x", bytes(size), repeatable=True)
        assert (await link.call(call))["size"] == size
        assert house.running.doors.connections == 1
    link.close()
    await gone(house)


async def test_a_server_that_speaks_only_grpc_is_named_as_such(house: TlsHouse) -> None:
    """As gateways before 0.2 are: HTTP/2 and nothing else."""
    context = house.authority.server_context()
    context.set_alpn_protocols(["h2"])
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        with contextlib.suppress(OSError):
            context.wrap_socket(listener.accept()[0], server_side=True).recv(1)

    thread = threading.Thread(target=serve)
    thread.start()
    ca = str(house.authority.directory / "sandbox-ca.crt")
    link = RemoteLink(f"127.0.0.1:{listener.getsockname()[1]}", api_key="k" * 8, ca_cert=ca)
    with pytest.raises(errors.DaemonUnreachable, match=r"HTTP/1\.1") as caught:
        await asyncio.to_thread(link.call, calls.get("/v1/health"))
    assert "gRPC" in (caught.value.hint or "")
    listener.close()
    thread.join(30)


async def test_a_key_is_never_sent_to_a_server_that_is_not_verified(house: TlsHouse, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    stranger = TlsHouse(other)
    link = RemoteLink(house.endpoint, api_key="k" * 8, ca_cert=str(stranger.authority.directory / "sandbox-ca.crt"))
    with pytest.raises(errors.DaemonUnreachable, match="not trusted"):
        await asyncio.to_thread(link.call, calls.get("/v1/health"))
    assert house.app.served == 0
    stranger.keys.close()


@pytest.mark.skipif(os.geteuid() != 0, reason="needs a second address")
async def test_another_address_needs_a_key(house: TlsHouse) -> None:
    """What is no loopback connection of this user has nobody behind it without a key."""
    peer = visits.Peer("192.0.2.1:1", None)
    with pytest.raises(errors.Unauthenticated):
        house.keeper.identify(peer, None)
