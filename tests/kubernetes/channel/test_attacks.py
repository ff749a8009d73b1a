"""Peers that are no gateway, and programs of the sandbox, against the agent's port."""

import asyncio
import contextlib
import hashlib
import os
import socket
import ssl
import subprocess
import time
from pathlib import Path

import pytest
from lab.internet import wait_for
from lab.pods import GATEWAY, POD, POD_UID, PORT, PROGRAM, Pod, can_run_pods

from atoll import errors
from atoll.backends.kubernetes.channel import ACTIVATE, AGENT, EGRESS, GatewayKey, dial
from atoll.guest import Process, wire


def connect(source: str = "") -> socket.socket:
    sock = socket.create_connection((POD, PORT), timeout=60, source_address=(source, 0) if source else None)
    return sock


def is_closed(sock: socket.socket) -> bool:
    """Whether the agent hangs up; what it may say before is an alert."""
    try:
        while data := sock.recv(4096):
            assert data[0] == 21, data  # a TLS alert
    except ConnectionResetError:
        pass
    return True


async def test_garbage_and_old_tls_are_refused(pod: Pod) -> None:
    """Nothing but TLS 1.3 with a purpose and the right key gets an answer."""
    for garbage in (
        b"GET / HTTP/1.1\r\n\r\n",
        os.urandom(5000),
        b"\x16\x03\x01\xff\xff" + bytes(70_000),
        b"\x16\x03\x01\x40\x00\x01\x00\x3f\xfc" + bytes(20_000),
    ):
        with connect() as sock, contextlib.suppress(OSError):
            sock.sendall(garbage)
            assert is_closed(sock)
    for change in ("old", "purpose", "none"):
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        if change == "old":
            context.maximum_version = ssl.TLSVersion.TLSv1_2
        if change == "purpose":
            context.set_alpn_protocols(["h2"])
        if change == "none":
            context.set_alpn_protocols([ACTIVATE])  # and no certificate
        with connect() as sock, pytest.raises((ssl.SSLError, ConnectionError)):
            tls = context.wrap_socket(sock)
            if not tls.recv(1):
                raise ConnectionResetError
    assert (await pod.order({"op": "status"}))["activated"] is False


async def test_another_key_and_no_purpose(pod: Pod) -> None:
    """A stranger's key is refused and noted; a gateway that names no purpose is hung up on."""
    with pytest.raises(errors.PermissionDenied):
        await pod.order(pod.activation(), GatewayKey.generate())
    assert pod.process.stdout is not None
    assert f"refused a connection from {GATEWAY}" in pod.process.stdout.readline()
    context = pod.key._make_context(AGENT)
    context.set_alpn_protocols([])
    reader, writer = await asyncio.open_connection(POD, PORT, ssl=context, server_hostname="")
    assert await reader.read() == b""
    writer.close()


async def test_a_recorded_activation_is_worth_nothing(pod: Pod) -> None:
    """The bytes of a good activation, sent again to the same agent and to another one, activate nothing."""
    sent: list[bytes] = []

    async def record(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection(POD, PORT)

        async def carry(source: asyncio.StreamReader, sink: asyncio.StreamWriter, keep: list[bytes]) -> None:
            while data := await source.read(65536):
                keep.append(data)
                sink.write(data)
            sink.close()

        await asyncio.gather(carry(reader, back, sent), carry(there, writer, []))

    async with await asyncio.start_server(record, GATEWAY, 0) as server:
        port = server.sockets[0].getsockname()[1]
        reader, writer = await dial(pod.key, GATEWAY, port, pod.fingerprint, ACTIVATE)
        body = b'{"v":1,"op":"status"}'
        writer.write(len(body).to_bytes(4, "big") + body)
        assert b'"activated":false' in await reader.read()
        writer.close()
    with connect() as sock, contextlib.suppress(OSError):
        for piece in sent:
            sock.sendall(piece)
        answer = b""
        while data := sock.recv(4096):
            answer += data
        assert b"activated" not in answer


async def test_strangers_cannot_keep_the_gateway_out(pod: Pod) -> None:
    """A thousand connections that say nothing, or only half a hello, cost little memory and end by themselves."""
    status = Path(f"/proc/{pod.agent_pid()}/status")

    def memory() -> int:
        return int(next(line.split()[1] for line in status.read_text().splitlines() if line.startswith("VmRSS")))

    before, opened = memory(), []
    try:
        for number in range(1000):
            sock = connect()
            opened.append(sock)
            if number % 2:
                sock.sendall(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03")
            if number % 250 == 249:
                assert (await pod.order({"op": "status"}))["activated"] is False
        assert memory() - before < 4096, "KiB"
        files = len(os.listdir(f"/proc/{pod.agent_pid()}/fd"))
        assert files < 50
        assert await asyncio.to_thread(lambda: all(is_closed(sock) for sock in opened))
    finally:
        for sock in opened:
            sock.close()
    assert (await pod.order(pod.activation()))["again"] is False


async def test_a_slow_handshake_ends(pod: Pod) -> None:
    """A hello that comes byte by byte is cut after five seconds in all."""
    started = time.monotonic()
    with connect() as sock:
        sock.settimeout(0.2)
        hello = b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(500)
        for at in range(500):
            try:
                sock.sendall(hello[at : at + 1])
                if not sock.recv(10):
                    break
            except TimeoutError:
                continue
            except OSError:
                break
        else:
            pytest.fail("never cut")
    assert time.monotonic() - started < 60


async def test_programs_of_the_sandbox_cannot_reach_the_port(pod: Pod) -> None:
    """Whichever of its own addresses a program dials or comes from, it is reset before a byte is read."""
    await pod.order(pod.activation())
    for target in (POD, "127.0.0.1", "::1", "127.64.0.9"):

        def attempt(address: str = target) -> bool:
            try:
                with socket.create_connection((address, PORT), timeout=60) as sock:
                    return sock.recv(1) == b""
            except ConnectionResetError:
                return True

        assert pod.inside(attempt)


async def test_programs_of_the_sandbox_cannot_read_the_agent(pod: Pod) -> None:
    """Root inside, with every capability that it can have, reads neither memory nor descriptors of PID 1."""
    await pod.order(pod.activation())
    client = pod.client()
    lines = [
        "! cat /proc/1/mem",
        "! cat /proc/1/environ",
        "! readlink /proc/1/fd/3",
        "! true < /proc/1/fd/1",
        "! cat /proc/1/auxv",
        "! cat /proc/1/maps",
        "kill -9 1; kill -TERM 1; kill -STOP 1; true",
    ]
    for number, line in enumerate(lines):
        process = await Process.start(client, f"p{number}", {"argv": ["/bin/sh", "-c", line]})
        output = b"".join([data async for _, data in process])
        assert process.exit is not None and process.exit.code == 0, (line, output)
    caps = await Process.start(
        client, "caps", {"argv": ["/bin/sed", "-n", "s/^Cap[BEPI][a-z]*:\\t*//p", "/proc/self/status"]}
    )
    sets = [int(line, 16) for line in b"".join([data async for _, data in caps]).split()]
    assert sets and not any(value >> bit & 1 for value in sets for bit in (12, 13, 19, 21, 38))
    await client.close()


async def test_wrong_secrets_and_broken_frames_end_only_their_connection(pod: Pod) -> None:
    """On an open channel the hello still decides, and garbage costs the connection alone."""
    await pod.order(pod.activation())
    good = pod.client()
    assert (await good.request("info"))["boot"]
    wrong = wire.control(wire.HELLO, 0, {"v": 1, "secret": pod.key.hello_secret("another-claim", POD_UID, "host")})
    for purpose in (AGENT, EGRESS):
        for sent in (wrong, hashlib.sha512(b"garbage").digest() * 200):
            reader, writer = await dial(pod.key, POD, PORT, pod.fingerprint, purpose)
            writer.write(sent)
            with contextlib.suppress(OSError):
                assert await reader.read() == b""
            writer.close()
    assert (await good.request("info"))["boot"]
    await good.close()


async def test_a_pod_that_is_deleted_ends_at_once(pod: Pod) -> None:
    """SIGTERM before and without an activation ends PID 1."""
    os.kill(pod.agent_pid(), 15)
    assert pod.ended() == 0
    wait_for("port to close", lambda: _refused())


def _refused() -> bool:
    try:
        connect().close()
    except OSError:
        return True
    return False


@pytest.mark.skipif(not can_run_pods(), reason="needs root, and the agent of pods")
def test_an_agent_without_a_good_key_does_not_start() -> None:
    """Keys that are missing, short, too many or no Base64 end it before it listens."""
    good = GatewayKey.generate().public
    for keys in ([], [""], ["A" * 43], ["!" + good[1:]], [good[:-4]], [good] * 5):
        arguments = [word for key in keys for word in ("--gateway-key", key)]
        done = subprocess.run([PROGRAM, "pod", *arguments], capture_output=True, text=True)
        assert done.returncode == 1 and "--gateway-key" in done.stderr and not done.stdout
