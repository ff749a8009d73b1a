"""F2-H4: strangers at the gRPC port, and keys with messages that never end, hold little of the daemon's memory."""

import json
from collections.abc import Iterator

import grpc
import pytest
from lab.daemon import until
from lab.grpc_daemon import GrpcDaemon, started
from lab.raw_http2 import DATA, END_STREAM, NOBODY, PADDED, RawClient, dial, frame, pour

from atoll.proto.sandbox.v1 import sandbox_pb2 as pb
from atoll.proto.sandbox.v1 import sandbox_pb2_grpc
from atoll.surfaces.k8e.grpc import doors
from atoll.surfaces.k8e.grpc.messages import OVERHEAD, Edges, Unfinished

METHOD = "/sandbox.v1.SandboxService/CreateSession"
HEALTH = "/grpc.health.v1.Health/Check"
MIB = 1 << 20
STRANGERS_MIB = 96  # SECURITY.md: what strangers can make the daemon hold, whatever they open
KEY_MIB = 32


class Served(GrpcDaemon):
    """A daemon with gRPC on a port of its own."""

    def __init__(self) -> None:
        super().__init__(f"[accounts.owner]\nmemory_mb = {KEY_MIB}\n")

    @property
    def rss(self) -> int:
        return self.memory("VmRSS")

    def stub(self, key: str) -> tuple[grpc.Channel, sandbox_pb2_grpc.SandboxServiceStub]:
        creds = grpc.ssl_channel_credentials(self.ca.encode())
        channel = grpc.secure_channel(f"127.0.0.1:{self.port}", creds)
        return channel, sandbox_pb2_grpc.SandboxServiceStub(channel)


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    made = Served()
    with started(made):
        yield made


@pytest.mark.parametrize("path", [METHOD, HEALTH, "/no.such.Service/Call"])
def test_messages_of_strangers_are_not_kept(served: Served, path: str) -> None:
    before = served.rss
    clients = [RawClient(served.port, served.ca) for _ in range(4)]
    try:
        pour(clients, path, 10, 60 * MIB)
        grown = served.rss - before
        assert grown < 40, f"{grown} MiB for four connections without a key"
    finally:
        for client in clients:
            client.close()


def test_any_number_of_strangers_holds_a_stated_amount(served: Served) -> None:
    """More connections than there are places, each with calls of 1 MiB under way; and a place is left for others."""
    before, clients = served.rss, list[RawClient]()
    try:
        for _ in range(300):
            try:
                clients.append(RawClient(served.port, served.ca))
            except OSError:
                continue  # there is no place for it
        pour(clients, METHOD, 2, MIB)
        assert served.rss - before < STRANGERS_MIB, f"{served.rss - before} MiB for {len(clients)} connections"
        assert sum(not client.closed for client in clients) <= 256
        assert served.get("/v1/health")["ok"]
    finally:
        for client in clients:
            client.close()
    until(lambda: not served.get("/v1/accounts")["accounts"].get("stranger 127.0.0.1"), "all places are given back")


def test_a_stranger_with_many_refused_calls_is_cut(served: Served) -> None:
    client = RawClient(served.port, served.ca)
    try:
        for _ in range(4 * doors.STRANGER_CALLS):
            client.open(METHOD, 10)
            client.read(0.2)
            if client.closed:
                break
        assert client.closed
    finally:
        client.close()


def test_a_first_message_of_a_key_may_be_large(served: Served) -> None:
    """What a stranger may not send a key may, also when nobody on its connection was known before."""
    made = served.create()
    channel, stub = served.stub(key := served.key("large"))
    try:
        with pytest.raises(grpc.RpcError) as refused:
            stub.WriteFile(
                pb.WriteFileRequest(session_id=made.id, path="/workspace/x", content="x" * (20 * MIB)),
                metadata=(("authorization", f"Bearer {key}"),),
                timeout=120,
            )
        assert refused.value.code() is grpc.StatusCode.NOT_FOUND, "it was read, and the sandbox is somebody else's"
    finally:
        channel.close()
        made.destroy()


def test_unfinished_messages_of_a_key_are_charged_to_it(served: Served) -> None:
    key, other = served.key("slow"), served.key("other")
    before = served.rss
    client = RawClient(served.port, served.ca)
    try:
        sent = pour([client], METHOD, 10, 60 * MIB, key)
        assert client.closed and sent < 4 * KEY_MIB * MIB
        assert served.rss - before < KEY_MIB + 24
        channel, stub = served.stub(other)
        answer = stub.ListSessions(
            pb.ListSessionsRequest(), metadata=(("authorization", f"Bearer {other}"),), timeout=60
        )
        assert not answer.sessions
        channel.close()
    finally:
        client.close()
    # A key's audit records are counted until its day is over.
    until(lambda: not _held(served.get("/v1/accounts")["accounts"]), "nothing is held any more")


def test_a_key_at_its_cap_is_told_so(served: Served) -> None:
    """A stock client gets RESOURCE_EXHAUSTED, and what it holds is given back."""
    channel, stub = served.stub(key := served.key("greedy"))
    size = KEY_MIB * MIB * 3 // 4
    try:
        calls = [
            stub.WriteFile.future(
                pb.WriteFileRequest(session_id="none", path="/workspace/x", content="x" * size),
                metadata=(("authorization", f"Bearer {key}"),),
                timeout=120,
            )
            for _ in range(4)
        ]
        codes = [call.code() for call in calls]
        assert grpc.StatusCode.RESOURCE_EXHAUSTED in codes, codes
    finally:
        channel.close()
    until(lambda: not _held(served.get("/v1/accounts")["accounts"]), "nothing is held any more")


@pytest.mark.parametrize("step", [1, 5, 9, 10, 1000])
def test_another_frame_may_follow_a_whole_one_only(step: int) -> None:
    first, second = frame(DATA, 0, 1, bytes(20)), frame(4, 0, 0)
    edges, fed, text = Edges(), 0, first + second
    for at in range(0, len(text), step):
        edges.feed(text[at : at + step])
        fed += len(text[at : at + step])
        assert edges.whole == (fed in (len(first), len(text)))


def test_silent_connections_end(served: Served) -> None:
    """Connections on which TLS is never spoken end by themselves, and do not keep others out."""
    silent = [dial(served.port, NOBODY) for _ in range(400)]
    try:
        assert json.dumps(served.get("/v1/health"))
        channel, stub = served.stub(key := served.key("late"))
        stub.ListSessions(pb.ListSessionsRequest(), metadata=(("authorization", f"Bearer {key}"),), timeout=90)
        channel.close()
    finally:
        for sock in silent:
            sock.close()


def _message(size: int) -> bytes:
    return b"\0" + size.to_bytes(4, "big")


@pytest.mark.parametrize("step", [1, 2, 3, 7, 1000])
def test_counting_does_not_depend_on_the_pieces(step: int) -> None:
    padded = frame(DATA, PADDED, 3, b"\x05" + _message(50) + bytes(20) + b"\0\0\0\x01\0")
    text = bytes(24) + frame(DATA, 0, 1, _message(100) + bytes(60)) + padded
    counted = Unfinished()
    for at in range(0, len(text), step):
        counted.feed(text[at : at + step])
    assert counted.held == 60 + 20 + 2 * OVERHEAD
    rest = (
        frame(DATA, 0, 1, bytes(40) + _message(0) + _message(7)) + frame(DATA, END_STREAM, 3, bytes(3)) + frame(3, 0, 1)
    )
    rest += frame(DATA, PADDED, 5, b"\xff") + frame(DATA, 0, 7)
    for at in range(0, len(rest), step):
        counted.feed(rest[at : at + step])
    assert counted.held == 0 and not counted._streams


def _held(accounts: dict[str, dict[str, int]]) -> dict[str, dict[str, int]]:
    """Every account but that of audit records."""
    kinds = {holder: {kind: n for kind, n in held.items() if kind != "audit"} for holder, held in accounts.items()}
    return {holder: held for holder, held in kinds.items() if held}
