"""The sans-I/O HTTP core: whatever the cuts between packets, the same answer; nothing malformed passes."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.client import codec, websocket
from atoll.client.http import (
    Cut,
    FrameParser,
    ProtocolError,
    ResponseParser,
    encode_chunk,
    encode_request,
    quote,
    with_query,
)

CHUNKED = (
    b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5;x=1\r\nhello\r\n6\r\n world\r\n0\r\nTrailer: x\r\n\r\n"
)
SIZED = b"HTTP/1.1 201 Created\r\nContent-Length: 11\r\nX-A: b\r\n\r\nhello world"
INTERIM = b"HTTP/1.1 100 Continue\r\n\r\n" + SIZED


def parse(data: bytes, cuts: list[int]) -> tuple[ResponseParser, bytes]:
    parser, body, start = ResponseParser(), b"", 0
    for cut in [*sorted(cuts), len(data)]:
        if cut > start:
            parser.feed(data[start:cut])
            body += parser.take()
            start = cut
    return parser, body


@pytest.mark.parametrize("whole", [CHUNKED, SIZED, INTERIM])
@settings(max_examples=60)
@given(cuts=st.lists(st.integers(0, 200), max_size=12))
def test_an_answer_reads_the_same_however_it_is_cut(whole: bytes, cuts: list[int]) -> None:
    parser, body = parse(whole, [c for c in cuts if c < len(whole)])
    assert parser.done and parser.head is not None
    assert (parser.head.status, body) == (201 if whole is not CHUNKED else 200, b"hello world")


@pytest.mark.parametrize("whole", [CHUNKED, SIZED])
def test_every_cut_off_answer_is_reported(whole: bytes) -> None:
    for end in range(len(whole)):
        parser = ResponseParser()
        parser.feed(whole[:end]) if end else None
        assert not parser.done
        with pytest.raises(Cut):
            parser.eof()


@pytest.mark.parametrize(
    "bad",
    [
        b"HTTP/2 200\r\n\r\n",
        b"HTTP/1.1 abc\r\n\r\n",
        b"nonsense\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nbad line\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n folded: x\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 5x\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip, chunked\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nContent-Length: 5\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n-5\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabcXX",
        b"HTTP/1.1 200 OK\r\nA: " + b"x" * 70_000,
    ],
)
def test_a_malformed_answer_is_refused(bad: bytes) -> None:
    with pytest.raises(ProtocolError):
        ResponseParser().feed(bad)


@settings(max_examples=200)
@given(st.binary(max_size=300))
def test_no_bytes_make_the_parser_fail_otherwise(data: bytes) -> None:
    parser = ResponseParser()
    try:
        parser.feed(data)
        parser.feed(b"\r\n\r\n")
        parser.eof()
    except (ProtocolError, Cut):
        pass


@settings(max_examples=100)
@given(st.lists(st.tuples(st.integers(1, 5), st.binary(max_size=40)), max_size=8), st.integers(1, 7))
def test_frames_survive_any_cut(frames: list[tuple[int, bytes]], step: int) -> None:
    keepalive = b"\0\0\0\0\0"
    data = b"".join(keepalive + bytes([kind]) + len(load).to_bytes(4, "big") + load for kind, load in frames)
    parser, found = FrameParser(), []
    for start in range(0, len(data), step):
        found += parser.feed(data[start : start + step])
    assert found == frames


def test_a_frame_too_large_or_unknown_is_refused() -> None:
    with pytest.raises(ProtocolError):
        FrameParser().feed(b"\x01\xff\xff\xff\xff")
    with pytest.raises(ProtocolError):
        FrameParser().feed(b"\x09\0\0\0\0")


def test_requests_cannot_be_split_by_a_header() -> None:
    with pytest.raises(ValueError):
        encode_request("GET", "/", [("X", "a\r\nHost: evil")])
    assert encode_chunk(b"") == b""


def test_names_keep_their_bytes_in_queries() -> None:
    assert quote("a b/ü?&\udcff") == "a%20b/%C3%BC%3F%26%FF"
    assert with_query("/x", {"path": "a&b=c", "no": None, "yes": True, "n": 3}) == "/x?path=a%26b%3Dc&yes=1&n=3"


@settings(max_examples=200)
@given(
    st.recursive(
        st.none()
        | st.booleans()
        | st.integers(-(2**53), 2**53)
        | st.floats(allow_nan=False, allow_infinity=False)
        | st.text(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
        max_leaves=20,
    )
)
def test_json_round_trip(value: object) -> None:
    text = codec.dumps(value)
    assert text.isascii() and "\n" not in text
    assert codec.loads(text) == value


@pytest.mark.parametrize("bad", ["", "{", '{"a":}', "[1] x", "nope", '"abc', b"\xff", "[1,]"])
def test_broken_json_is_a_value_error(bad: str | bytes) -> None:
    with pytest.raises(ValueError):
        codec.loads(bad)


@settings(max_examples=50)
@given(st.lists(st.binary(max_size=70_000), max_size=3), st.integers(1, 5000))
def test_websocket_messages_survive_any_cut(messages: list[bytes], step: int) -> None:
    unmasked = b""
    for message in messages:
        frame = websocket.encode(websocket.BINARY, message)
        head = len(frame) - len(message) - 4
        unmasked += bytes([frame[0], frame[1] & 0x7F]) + frame[2:head] + message
    decoder, found = websocket.Decoder(), []
    for start in range(0, len(unmasked), step):
        found += decoder.feed(unmasked[start : start + step])
    assert [payload for _, payload in found] == messages
