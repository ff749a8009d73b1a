"""What a broken connection means: nothing is sent twice that may have run, and the caller is told the truth."""

import asyncio
import os
import socket
from collections.abc import Callable
from typing import Any

import pytest

from atoll.client import calls
from atoll.client._async.driver import AsyncLink
from atoll.client._sync.driver import Link
from atoll.client.calls import Call
from atoll.errors import AtollError, DaemonUnreachable, InvalidArgument, OutcomeUnknown, TooLarge, Unavailable

from .scripted import answer, read_request, replies, scripted

RUN = b'{"command_id":"c1","sandbox_id":"s1","status":"completed","exit_code":0,"stdout":"hi"}'


def run_call() -> Call:
    return calls.start("box", "echo hi", language="bash", timeout=20)


def blocking(path: str, work: Callable[[Any], list[Any]]) -> list[Any]:
    link = Link(path=path)
    try:
        return [link.call(call) for call in work(None)]
    finally:
        link.close()


def asynchronous(path: str, work: Callable[[Any], list[Any]]) -> list[Any]:
    async def main() -> list[Any]:
        link = AsyncLink(path=path)
        try:
            return [await link.call(call) for call in work(None)]
        finally:
            link.close()

    return asyncio.run(main())


drivers = pytest.mark.parametrize("drive", [blocking, asynchronous])


@drivers
def test_a_command_whose_answer_is_lost_is_never_repeated(drive: Any) -> None:
    seen: list[bytes] = []

    def swallow(conn: socket.socket) -> None:
        seen.append(read_request(conn))

    with scripted(swallow) as server:
        call = run_call()
        with pytest.raises(OutcomeUnknown) as caught:
            drive(server.path, lambda _: [call])
        assert len(seen) == 1 and server.connections == 1
    assert caught.value.details["command_id"] == call.command_id
    assert caught.value.retry == "never"


@drivers
@pytest.mark.parametrize("part", [5, 60, -3])
def test_a_cut_answer_to_a_command_is_an_unknown_outcome(drive: Any, part: int) -> None:
    seen: list[bytes] = []
    with scripted(replies(seen, answer(RUN)[:part])) as server:
        with pytest.raises(OutcomeUnknown):
            drive(server.path, lambda _: [run_call()])
        assert len(seen) == 1


@drivers
def test_a_lost_question_is_asked_again(drive: Any) -> None:
    seen: list[bytes] = []

    def swallow(conn: socket.socket) -> None:
        seen.append(read_request(conn))

    with scripted(swallow, replies(seen, answer(b'{"ok":true}'))) as server:
        assert drive(server.path, lambda _: [calls.get("/v1/health")]) == [{"ok": True}]
        assert len(seen) == 2


@drivers
def test_a_question_that_is_always_lost_ends_as_unavailable(drive: Any) -> None:
    with scripted(lambda conn: None) as server:
        with pytest.raises(Unavailable):
            drive(server.path, lambda _: [calls.get("/v1/health")])
        assert server.connections == 3


@drivers
def test_a_kept_connection_that_was_closed_is_not_used_for_a_command(drive: Any) -> None:
    """The daemon restarted between two calls: the second goes out once, on a fresh connection."""
    seen: list[bytes] = []
    with scripted(replies(seen, answer(RUN)), replies(seen, answer(RUN))) as server:

        def work(_: Any) -> Any:
            yield run_call()
            assert server.hung_up.wait(30)
            yield run_call()

        assert len(drive(server.path, work)) == 2
        assert len(seen) == 2 and server.connections == 2


@drivers
def test_connections_are_reused(drive: Any) -> None:
    seen: list[bytes] = []
    with scripted(replies(seen, *[answer(b"{}")] * 5)) as server:
        drive(server.path, lambda _: [calls.get("/v1/health") for _ in range(5)])
        assert server.connections == 1 and len(seen) == 5


@drivers
def test_an_error_is_raised_as_the_class_it_had(drive: Any) -> None:
    body = b'{"error":{"code":"invalid_argument","message":"no","hint":"do","details":{"field":"x"}}}'
    with scripted(replies([], answer(body, "400 Bad Request"))) as server, pytest.raises(InvalidArgument) as caught:
        drive(server.path, lambda _: [run_call()])
    assert (caught.value.message, caught.value.hint, caught.value.details) == ("no", "do", {"field": "x"})


@drivers
@pytest.mark.parametrize("reply", [b"SSH-2.0-x\r\n\r\n", answer(b"<html>", "502 Bad"), answer(b"not json")])
def test_an_answer_that_is_no_answer_is_a_typed_error(drive: Any, reply: bytes) -> None:
    with scripted(replies([], reply)) as server, pytest.raises(AtollError):
        drive(server.path, lambda _: [run_call()])


@drivers
def test_an_early_refusal_of_a_large_body_is_heard(drive: Any) -> None:
    """The server says 413 and hangs up without reading the rest: the caller gets that, not a broken pipe."""
    body = b'{"error":{"code":"too_large","message":"too much"}}'

    def refuse(conn: socket.socket) -> None:
        conn.recv(1000)
        conn.sendall(answer(body, "413 Too Large", b"Connection: close\r\n"))

    with scripted(refuse) as server, pytest.raises(TooLarge):
        drive(server.path, lambda _: [calls.start("box", "x" * 30_000_000, language="python")])


@drivers
def test_a_daemon_that_never_answers_is_given_up(drive: Any) -> None:
    def stall(conn: socket.socket) -> None:
        read_request(conn)
        conn.recv(1)  # until the client goes

    call = run_call()
    call.timeout = 0.2
    with scripted(stall) as server, pytest.raises(OutcomeUnknown):
        drive(server.path, lambda _: [call])


@drivers
def test_nobody_there_is_daemon_unreachable(drive: Any, tmp_path: Any) -> None:
    with pytest.raises(DaemonUnreachable):
        drive(os.fspath(tmp_path / "none"), lambda _: [run_call()])


def frame(kind: int, payload: bytes) -> bytes:
    return bytes([kind]) + len(payload).to_bytes(4, "big") + payload


def chunked(*pieces: bytes, end: bool = True) -> bytes:
    head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    return head + b"".join(b"%x\r\n%b\r\n" % (len(p), p) for p in pieces) + (b"0\r\n\r\n" if end else b"")


@pytest.mark.parametrize("end", [True, False])
def test_a_stream_without_its_result_was_cut(end: bool) -> None:
    """Even a stream that ends politely is cut when the result never came."""
    reply = chunked(frame(1, b"one"), frame(2, b"two"), end=end)
    with scripted(replies([], reply)) as server:
        values = []
        with pytest.raises(OutcomeUnknown):
            for value in Link(path=server.path).open(run_call()).frames():
                values.append(value)
        assert [v.data for v in values] == [b"one", b"two"]


def test_a_stream_gives_frames_and_then_the_result() -> None:
    pieces = frame(3, b'{"started":{"pid":7}}') + frame(1, b"a\n\nb") + frame(0, b"") + frame(4, RUN)
    reply = chunked(*[pieces[i : i + 3] for i in range(0, len(pieces), 3)])
    with scripted(replies([], reply)) as server:
        call = run_call()
        started, output, result = list(Link(path=server.path).open(call).frames())
    assert (started.command_id, started.pid) == (call.command_id, 7)
    assert (output.stream, output.data) == ("stdout", b"a\n\nb")
    assert result["exit_code"] == 0


def test_an_error_in_a_stream_is_raised() -> None:
    reply = chunked(frame(1, b"x"), frame(5, b'{"code":"unavailable","message":"gone"}'))
    with scripted(replies([], reply)) as server, pytest.raises(Unavailable, match="gone"):
        list(Link(path=server.path).open(run_call()).frames())


@drivers
def test_a_local_file_that_cannot_be_read_is_not_a_lost_connection(drive: Any) -> None:
    def broken() -> Any:
        yield b"x" * 100_000
        raise FileNotFoundError("gone")

    async def async_broken() -> Any:
        for piece in broken():
            yield piece

    def stall(conn: socket.socket) -> None:
        read_request(conn)

    call = calls.write_file("box", "/workspace/x", None)
    with scripted(stall) as server, pytest.raises(FileNotFoundError):
        if drive is blocking:
            Link(path=server.path).open(call, broken())
        else:

            async def main() -> None:
                await AsyncLink(path=server.path).open(call, async_broken())

            asyncio.run(main())
