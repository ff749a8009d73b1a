"""Who is let in, and as whom: real TLS, real certificates, real Unix sockets, over a service that only says who called."""

import asyncio
import contextlib
import os
import secrets
import socket
import ssl
import stat
import subprocess
import sys
from pathlib import Path

import grpc
import pytest
import uvloop
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from atoll import errors
from atoll.core.access import rights_watch
from atoll.core.access.credentials import Doorkeeper, Peer, bearer_of
from atoll.core.access.keys import Keys
from atoll.server.socket_owner import loopback_owner
from atoll.server.tls import Authority
from atoll.surfaces.k8e.grpc import doors as doors_module
from atoll.surfaces.k8e.grpc import readers as readers_module
from atoll.surfaces.k8e.grpc.gateway import Gateway, parse_address
from atoll.surfaces.k8e.grpc.server import Service, start
from atoll.surfaces.k8e.grpc.status import error_of, message_of, status_of, trailers_of

from .mirror import NAME, SERVICE, Stub, pb
from .test_tls import request as csr

OPTIONS = [("grpc.max_receive_message_length", 64 << 20), ("grpc.max_send_message_length", 64 << 20)]


pytestmark = pytest.mark.filterwarnings('ignore:Overriding the "event_loop_policy" fixture')


@pytest.fixture
def event_loop_policy() -> asyncio.AbstractEventLoopPolicy:
    """The daemon runs on uvloop, whose TLS is not asyncio's. gRPC keeps to the kind of loop it saw first."""
    return uvloop.EventLoopPolicy()


class Mirror:
    """Answers with the caller's identity; fails on demand; streams until cancelled."""

    def __init__(self) -> None:
        self.cancelled = asyncio.Event()
        self.sent = 0

    async def Call(self, who, request):
        if request.method == "raise":
            raise errors.from_wire({"code": request.target, "message": "because", "details": {"a": 1}})
        if request.method == "bug":
            raise KeyError("/secret/path")
        if request.method == "size":
            return pb.CallResponse(status=len(request.body), body=request.body)
        if request.method == "large":
            return pb.CallResponse(status=200, body=bytes(int(request.target)))
        return pb.CallResponse(status=200, body=who.owner.encode())

    async def Stream(self, who, requests):
        try:
            async for _ in requests:
                while True:
                    yield pb.StreamResponse(data=b"x" * 65536)
                    self.sent += 1
                    await asyncio.sleep(0)
        finally:
            self.cancelled.set()

    async def Connect(self, who, requests):
        async for item in requests:
            yield pb.ConnectResponse(data=item.data)


class House:
    def __init__(self, home: Path) -> None:
        self.home = home
        self.keys = Keys(home / "atoll.db")
        self.authority = Authority(home / "tls")
        self.authority.ensure()
        self.keeper = Doorkeeper(self.keys, self.authority)
        self.mirror = Mirror()
        self.seen: list[tuple] = []

    async def open(self, listen=(("127.0.0.1", 0),)) -> None:
        service = Service(SERVICE, self.mirror, {"Call": "write"}, {"Connect": "admin"})

        async def starter(doors, keeper, authority):
            return await start(doors, [service], keeper, lambda *seen: self.seen.append(seen))

        self.running = Gateway(self.home, self.keeper, self.authority, starter)
        await self.running.open_tcp(listen)
        await self.running.open_unix()
        self.endpoint = f"127.0.0.1:{self.running.port}"

    def channel(self, pair: tuple[bytes, bytes] | None = None, endpoint: str | None = None):
        key, cert = pair or (None, None)
        creds = grpc.ssl_channel_credentials(self.authority.ca_pem.encode(), key, cert)
        return grpc.aio.secure_channel(endpoint or self.endpoint, creds, OPTIONS)

    def unix(self):
        return grpc.aio.insecure_channel(f"unix:{self.home / 'grpc.sock'}", OPTIONS)

    def pair(self, name: str) -> tuple[tuple[bytes, bytes], str]:
        key = ec.generate_private_key(ec.SECP256R1())
        leaf = self.authority.issue(csr(key), name, self.keys.get(name).id)
        pem = key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        return (pem, leaf.cert_pem.encode()), leaf.issued.fingerprint


@pytest.fixture
async def house(tmp_path: Path):
    made = House(tmp_path)
    await made.open()
    yield made
    await made.running.close(0)
    made.keys.close()


def bearer(key: str) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {key}"),)


async def whoami(channel, metadata=()) -> str:
    async with channel:
        answer = await Stub(channel).Call(pb.CallRequest(), metadata=metadata, timeout=30)
        return answer.body.decode()


async def refused(channel, metadata=()) -> grpc.StatusCode:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await whoami(channel, metadata)
    return caught.value.code()


ME = f"uid:{os.geteuid()}"


async def test_unix_socket_is_the_local_user_and_private(house: House) -> None:
    assert await whoami(house.unix()) == ME
    assert stat.S_IMODE((house.home / "grpc.sock").stat().st_mode) == 0o600


async def test_loopback_without_key_is_the_owner_of_the_socket(house: House) -> None:
    assert await whoami(house.channel()) == ME


async def test_loopback_of_another_user_needs_a_key(house: House) -> None:
    """The same machine, another uid: refused without a key, welcome with one."""
    if os.geteuid() != 0:
        pytest.skip("only root can become somebody else")
    made = house.keys.create("guest")
    program = (
        "import os, sys, socket, ssl; os.setgid(65534); os.setuid(65534)\n"
        "s = socket.create_connection(('127.0.0.1', int(sys.argv[1]))); print(s.getsockname()[1], flush=True)\n"
        "sys.stdin.read()"
    )
    child = subprocess.Popen(  # noqa: ASYNC220
        [sys.executable, "-c", program, str(house.running.port)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        port = int(await asyncio.to_thread(child.stdout.readline))
        uid = loopback_owner(("127.0.0.1", port), ("127.0.0.1", house.running.port))
        assert uid == 65534
        with pytest.raises(errors.Unauthenticated):
            house.keeper.identify(Peer("127.0.0.1", uid), None)
        assert house.keeper.identify(Peer("127.0.0.1", uid), made.secret).owner == "key:guest"
    finally:
        child.stdin.close()
        child.wait(30)
        child.stdout.close()


def test_owner_of_what_is_not_a_loopback_connection_is_unknown() -> None:
    assert loopback_owner(("192.0.2.1", 4), ("127.0.0.1", 5)) is None
    assert loopback_owner(("127.0.0.1", 1), ("127.0.0.1", 2)) is None


async def test_ipv6_loopback(tmp_path: Path) -> None:
    house = House(tmp_path)
    try:
        await house.open([("::1", 0)])
    except OSError:
        pytest.skip("no IPv6 here")
    try:
        assert await whoami(house.channel(endpoint=f"[::1]:{house.running.port}")) == ME
    finally:
        await house.running.close(0)


async def test_key_over_tls_and_unix(house: House) -> None:
    made = house.keys.create("ci")
    assert await whoami(house.channel(), bearer(made.secret)) == "key:ci"
    assert await whoami(house.channel(), bearer(made.e2b)) == "key:ci"
    assert await whoami(house.unix(), bearer(made.secret)) == "key:ci"


@pytest.mark.parametrize(
    "value", ["Bearer x", "Bearer", "Bearer ", "Basic abc", "", "bearer " + "0" * 64, "Bearer " + "f" * 4000]
)
async def test_a_wrong_key_is_never_ignored(house: House, value: str) -> None:
    """Not even on the Unix socket, where none was needed."""
    metadata = (("authorization", value),)
    assert await refused(house.channel(), metadata) is grpc.StatusCode.UNAUTHENTICATED
    assert await refused(house.unix(), metadata) is grpc.StatusCode.UNAUTHENTICATED


async def test_two_authorizations_are_refused(house: House) -> None:
    made = house.keys.create("ci")
    assert await refused(house.channel(), bearer(made.secret) + bearer("x")) is grpc.StatusCode.UNAUTHENTICATED


async def test_tenant_metadata_changes_nothing(house: House) -> None:
    made = house.keys.create("ci")
    metadata = (*bearer(made.secret), ("x-sandbox-tenant", "root"))
    assert await whoami(house.channel(), metadata) == "key:ci"


async def test_k8e_D19_plaintext_is_not_served(house: House) -> None:
    channel = grpc.aio.insecure_channel(house.endpoint)
    assert await refused(channel, bearer("x")) is grpc.StatusCode.UNAVAILABLE


async def test_client_certificate_is_the_keys_identity(house: House) -> None:
    house.keys.create("ci")
    pair, _ = house.pair("ci")
    assert await whoami(house.channel(pair)) == "key:ci"


async def test_k8e_D18_revoked_certificate(house: House) -> None:
    house.keys.create("ci")
    pair, finger = house.pair("ci")
    other, _ = house.pair("ci")
    house.authority.revoke(finger)
    assert await refused(house.channel(pair)) is grpc.StatusCode.PERMISSION_DENIED
    assert await whoami(house.channel(other)) == "key:ci"


async def test_k8e_D18_certificate_dies_with_its_key_and_not_with_its_namesake(house: House) -> None:
    house.keys.create("ci")
    pair, _ = house.pair("ci")
    house.keys.revoke("ci")
    assert await refused(house.channel(pair)) is grpc.StatusCode.UNAUTHENTICATED
    house.keys.create("ci")
    assert await refused(house.channel(pair)) is grpc.StatusCode.UNAUTHENTICATED


async def test_certificate_of_this_ca_that_is_not_in_the_ledger(house: House) -> None:
    house.keys.create("ci")
    pair, _ = house.pair("ci")
    (house.authority.directory / "sandbox-issued.json").unlink()
    assert await refused(house.channel(pair)) is grpc.StatusCode.UNAUTHENTICATED


async def test_revocation_counts_for_the_next_call_on_an_open_connection(house: House) -> None:
    made = house.keys.create("ci")
    async with house.channel() as channel:
        stub = Stub(channel)
        await stub.Call(pb.CallRequest(), metadata=bearer(made.secret), timeout=30)
        house.keys.revoke("ci")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Call(pb.CallRequest(), metadata=bearer(made.secret), timeout=30)
        assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED


async def test_revocation_ends_an_open_stream(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rights_watch, "INTERVAL", 0.05)
    made = house.keys.create("ci")
    async with house.channel() as channel:
        stream = Stub(channel).Stream(metadata=bearer(made.secret), timeout=60)
        await stream.write(pb.StreamRequest(data=b"go"))
        assert (await stream.read()).data
        house.keys.revoke("ci")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            while await stream.read() is not grpc.aio.EOF:
                pass
        assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
    await asyncio.wait_for(house.mirror.cancelled.wait(), 30)


async def test_revocation_of_a_certificate_ends_its_streams_and_not_the_keys(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rights_watch, "INTERVAL", 0.05)
    made = house.keys.create("ci")
    pair, fingerprint = house.pair("ci")
    async with house.channel(pair) as by_certificate, house.channel() as by_key:
        stream = Stub(by_certificate).Stream(timeout=60)
        await stream.write(pb.StreamRequest(data=b"go"))
        assert (await stream.read()).data
        house.authority.revoke(fingerprint)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            while await stream.read() is not grpc.aio.EOF:
                pass
        assert caught.value.code() is grpc.StatusCode.PERMISSION_DENIED
        stub = Stub(by_key)
        await stub.Call(pb.CallRequest(), metadata=bearer(made.secret), timeout=30)
    await asyncio.wait_for(house.mirror.cancelled.wait(), 30)


async def test_cancel_reaches_the_service_and_a_slow_reader_stops_the_writer(house: House) -> None:
    async with house.channel() as channel:
        stream = Stub(channel).Stream(timeout=60)
        await stream.write(pb.StreamRequest(data=b"go"))
        await stream.read()
        before = -1
        while house.mirror.sent != before:  # nobody reads: the writer has to come to a halt
            before = house.mirror.sent
            assert before * 65536 < 256 << 20
            await asyncio.sleep(0.5)
        stream.cancel()
        await asyncio.wait_for(house.mirror.cancelled.wait(), 30)


async def test_a_client_that_vanishes_cancels(house: House) -> None:
    channel = house.unix()
    stream = Stub(channel).Stream()
    await stream.write(pb.StreamRequest(data=b"go"))
    await stream.read()
    await channel.close(None)
    await asyncio.wait_for(house.mirror.cancelled.wait(), 30)


async def test_k8e_D24_rates_bind_keys_one_by_one_and_not_local_callers(house: House) -> None:
    one, two = house.keys.create("one"), house.keys.create("two")
    tight = house.keys.create("tight", quotas={"write_burst": 1, "write_rate": 0.001})
    pair, _ = house.pair("two")

    async def burst(count: int, channel, metadata=()) -> set[grpc.StatusCode]:
        async with channel:
            stub = Stub(channel)
            calls = [stub.Call(pb.CallRequest(), metadata=metadata, timeout=60) for _ in range(count)]
            return {(await call.code()) for call in calls}

    spoof = (("x-sandbox-tenant", secrets.token_hex(4)),)
    assert grpc.StatusCode.RESOURCE_EXHAUSTED in await burst(200, house.channel(), bearer(one.secret) + spoof)
    assert await burst(8, house.channel(), bearer(two.secret)) == {grpc.StatusCode.OK}
    assert grpc.StatusCode.RESOURCE_EXHAUSTED in await burst(200, house.channel(pair))
    assert await burst(2, house.channel(), bearer(tight.secret)) == {
        grpc.StatusCode.OK,
        grpc.StatusCode.RESOURCE_EXHAUSTED,
    }
    assert await burst(200, house.unix()) == {grpc.StatusCode.OK}


async def test_scopes(house: House) -> None:
    user, admin = house.keys.create("user"), house.keys.create("root", scopes=["admin"])
    boss = house.keys.create("boss", scopes=["approve"])

    async def connect(key: str) -> grpc.StatusCode:
        async with house.channel() as channel:
            call = Stub(channel).Connect(metadata=bearer(key), timeout=30)
            await call.done_writing()
            return await call.code()

    assert await connect(user.secret) is grpc.StatusCode.PERMISSION_DENIED
    assert await connect(admin.secret) is grpc.StatusCode.OK
    assert await refused(house.channel(), bearer(boss.secret)) is grpc.StatusCode.PERMISSION_DENIED


@pytest.mark.parametrize("code", sorted(errors.BY_CODE))
async def test_every_error_crosses_the_wire_as_itself(house: House, code: str) -> None:
    async with house.unix() as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await Stub(channel).Call(pb.CallRequest(method="raise", target=code), timeout=30)
    again = error_of(caught.value, acted=True)
    assert type(again) is errors.BY_CODE[code]
    assert (again.message, again.details) == ("because", {"a": 1})
    assert dict(caught.value.trailing_metadata())["atoll-code"] == code
    if isinstance(again, errors.NotFound):
        assert "not found" in caught.value.details()


async def test_a_bug_tells_nothing(house: House, caplog: pytest.LogCaptureFixture) -> None:
    async with house.unix() as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await Stub(channel).Call(pb.CallRequest(method="bug"), timeout=30)
    assert caught.value.code() is grpc.StatusCode.INTERNAL
    assert "secret" not in str(caught.value)
    assert "/secret/path" in caplog.text


def test_long_errors_fit_into_metadata() -> None:
    error = errors.InvalidArgument("é" * 100_000, details={"x": "y" * 100_000})
    assert sum(len(v) for _, v in trailers_of(error)) < 8000
    assert len(message_of(error)) <= 2000
    assert status_of(error) is grpc.StatusCode.INVALID_ARGUMENT


async def test_bytes_that_are_no_message_are_invalid_argument(house: House) -> None:
    async with house.unix() as channel:
        raw = channel.unary_unary(f"/{NAME}/Call")
        for junk in (b"\xff" * 40, b"\x0a\x02\xff\xfe", b"\x0a\xff\xff\xff\xff\x7f"):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await raw(junk, timeout=30)
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await channel.unary_unary(f"/{NAME}/Nothing")(b"", timeout=30)
        assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_messages_up_to_64_mib(house: House) -> None:
    async with house.channel() as channel:
        stub = Stub(channel)
        body = os.urandom(1 << 20) * 60
        answer = await stub.Call(pb.CallRequest(method="size", body=body), timeout=120)
        assert answer.status == len(body) and answer.body == body
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Call(pb.CallRequest(method="size", body=bytes(65 << 20)), timeout=120)
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_health_for_all_and_reflection_for_the_known(house: House) -> None:
    async with house.channel() as channel:
        health = health_pb2_grpc.HealthStub(channel)
        answer = await health.Check(health_pb2.HealthCheckRequest(service=NAME), timeout=30)
        assert answer.status == health_pb2.HealthCheckResponse.SERVING

        async def services(metadata=()) -> set[str]:
            reflection = reflection_pb2_grpc.ServerReflectionStub(channel)
            question = reflection_pb2.ServerReflectionRequest(list_services="")
            call = reflection.ServerReflectionInfo(iter([question]), metadata=metadata, timeout=30)
            return {s.name for answer in [a async for a in call] for s in answer.list_services_response.service}

        assert NAME in await services()
        with pytest.raises(grpc.aio.AioRpcError):
            await services(bearer("wrong"))


async def test_nobody_gets_past_the_doors(house: House) -> None:
    """The inner socket is private, and a connection to it that no door announced is a stranger."""
    inner = house.running.doors.inner
    assert stat.S_IMODE(inner.parent.stat().st_mode) == 0o700
    assert await refused(grpc.aio.insecure_channel(f"unix:{inner}")) is grpc.StatusCode.UNAUTHENTICATED


async def test_silent_and_noisy_connections_do_no_harm(house: House) -> None:
    silent = [socket.create_connection(("127.0.0.1", house.running.port)) for _ in range(50)]
    for noise in (b"GET / HTTP/1.1\r\n\r\n", b"\x00" * 100, os.urandom(4096), b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"):
        with socket.create_connection(("127.0.0.1", house.running.port)) as loud:
            loud.sendall(noise)
    assert await whoami(house.channel()) == ME
    for sock in silent:
        sock.close()


async def test_a_renewed_certificate_is_used_without_restart(house: House) -> None:
    def served() -> bytes:
        context = ssl.create_default_context(cadata=house.authority.ca_pem)
        bare = socket.create_connection(("127.0.0.1", house.running.port), timeout=30)
        with context.wrap_socket(bare, server_hostname="localhost") as tls:
            return tls.getpeercert(binary_form=True)

    before = await asyncio.to_thread(served)
    house.authority.server_cert_file.unlink()
    assert house.authority.ensure()
    house.running.context.load_cert_chain(house.authority.server_cert_file, house.authority.server_key_file)
    assert await asyncio.to_thread(served) != before


async def test_every_call_is_observed_without_its_key(house: House) -> None:
    made = house.keys.create("ci")
    await whoami(house.channel(), bearer(made.secret))
    await refused(house.channel(), bearer("0" * 64))
    assert [(who and who.owner, method, result) for who, method, _, result in house.seen] == [
        ("key:ci", f"{NAME}.Call", "ok"),
        (None, f"{NAME}.Call", "unauthenticated"),
    ]
    assert made.secret not in repr(house.seen)


def test_authorization_forms() -> None:
    assert bearer_of(None) is None
    assert bearer_of("bearer  x ") == "x"
    assert bearer_of("Token x") == ""


def test_addresses_to_listen_on() -> None:
    forms = {
        "50051": ("127.0.0.1", 50051),
        "127.0.0.1:0": ("127.0.0.1", 0),
        ":80": ("0.0.0.0", 80),
        "[::1]:9": ("::1", 9),
    }
    assert {text: parse_address(text) for text in forms} == forms
    for bad in ("", "host", "host:", "host:x", "host:70000", "host:-1", "host:１"):
        with pytest.raises(errors.InvalidArgument):
            parse_address(bad)


async def gone(house: House) -> None:
    """Wait until no connection is left, and with it nothing that was held for one."""
    async with asyncio.timeout(60):
        while house.running.doors.connections:
            await asyncio.sleep(0.02)


async def test_a_stream_that_nobody_reads_ends_and_then_its_connection(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doors_module, "STALL_SECONDS", 0.3)
    async with house.channel() as channel:
        stream = Stub(channel).Stream(timeout=120)
        await stream.write(pb.StreamRequest(data=b"go"))
        await asyncio.wait_for(house.mirror.cancelled.wait(), 60)
        await gone(house)
        async with asyncio.timeout(60):
            while not house.seen:
                await asyncio.sleep(0.02)
    assert house.seen[-1][3] == "timeout"


async def test_the_local_user_may_leave_a_stream_unread(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doors_module, "STALL_SECONDS", 0.05)
    async with house.unix() as channel:
        stream = Stub(channel).Stream(timeout=120)
        await stream.write(pb.StreamRequest(data=b"go"))
        await stream.read()
        before = -1
        while house.mirror.sent != before:
            before = house.mirror.sent
            await asyncio.sleep(0.5)
        assert not house.mirror.cancelled.is_set()
        while house.mirror.sent == before:
            assert (await stream.read()).data
        stream.cancel()


async def test_an_answer_in_one_message_that_nobody_takes_ends_its_connection(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doors_module, "STALL_SECONDS", 0.3)
    monkeypatch.setattr(readers_module, "SLOWEST", 1 << 30)
    reader, writer = await rude_caller(house, 1_000_000)
    with contextlib.suppress(ConnectionError):
        assert len(await asyncio.wait_for(reader.read(-1), 60)) < 200_000  # it ends, because the connection is cut
    await gone(house)
    writer.close()


async def test_a_connection_that_is_not_read_at_all_is_cut(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doors_module, "STALL_SECONDS", 0.3)
    _, writer = await rude_caller(house, 40_000_000, room=True)
    async with asyncio.timeout(60):
        while not house.seen:
            await asyncio.sleep(0.02)
    await gone(house)
    writer.close()


async def rude_caller(
    house: House, size: int, *, room: bool = False
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Asks for `size` bytes by hand, because no client library is that rude: room for 64 KiB, or for all without reading."""

    def frame(kind: int, flags: int, stream: int, body: bytes) -> bytes:
        return len(body).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + body

    fields = {
        ":method": "POST", ":scheme": "https", ":path": f"/{NAME}/Call", ":authority": "localhost",
        "te": "trailers", "content-type": "application/grpc",
    }  # fmt: skip
    heads = b"".join(
        b"\x10" + bytes([len(name)]) + name.encode() + bytes([len(value)]) + value.encode()
        for name, value in fields.items()
    )
    asked = pb.CallRequest(method="large", target=str(size)).SerializeToString()
    most = (2**31 - 1).to_bytes(4, "big")
    context = ssl.create_default_context(cadata=house.authority.ca_pem)
    context.set_alpn_protocols(["h2"])
    host, port = house.endpoint.split(":")
    reader, writer = await asyncio.open_connection(host, int(port), ssl=context)
    writer.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
    writer.write(frame(4, 0, 0, b"\0\x04" + most if room else b""))
    if room:
        writer.write(frame(8, 0, 0, (2**31 - 1 - 65535).to_bytes(4, "big")))
    writer.write(frame(1, 4, 1, heads) + frame(0, 1, 1, b"\0" + len(asked).to_bytes(4, "big") + asked))
    return reader, writer
