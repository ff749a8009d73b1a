"""Frames survive any fragmentation, and no input makes the reader do anything but give frames or raise WireError."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.guest import wire

STREAMS = st.integers(1, 2**32 - 1)
PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.text(max_size=20) | st.binary(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=20,
)
MAPS = st.dictionaries(st.text(max_size=8), PLAIN, max_size=5)


@st.composite
def encoded(draw: st.DrawFn) -> tuple[bytes, wire.Frame]:
    """One frame as bytes, and as the reader should give it."""
    stream, channel = draw(STREAMS), draw(st.integers(0, 2))
    which = draw(st.integers(0, 4))
    if which == 0:
        data = draw(st.binary(min_size=1, max_size=3000))
        return wire.data_head(stream, channel, len(data)) + data, wire.Frame(wire.DATA, stream, channel, data)
    if which == 1:
        return wire.eof(stream, channel), wire.Frame(wire.EOF, stream, channel, b"")
    if which == 2:
        amount = draw(st.integers(0, wire.MAX_CREDIT))
        return wire.credit(stream, channel, amount), wire.Frame(wire.CREDIT, stream, channel, amount.to_bytes(4, "big"))
    if which == 3:
        return wire.cancel(stream), wire.Frame(wire.CANCEL, stream, -1, b"")
    raw = wire.control(wire.EVENT, stream, draw(MAPS))
    return raw, wire.Frame(wire.EVENT, stream, -1, raw[wire.HEAD_BYTES :])


def joined(frames: list[wire.Frame]) -> list[wire.Frame]:
    """Pieces of DATA put together again where they follow one another."""
    out: list[wire.Frame] = []
    for frame in frames:
        last = out[-1] if out else None
        if last and frame.kind == last.kind == wire.DATA and frame[:3] == last[:3]:
            out[-1] = last._replace(payload=last.payload + frame.payload)
        else:
            out.append(frame)
    return out


@given(st.lists(encoded(), max_size=8), st.lists(st.integers(1, 400), min_size=1, max_size=30))
@settings(max_examples=150, deadline=None)
def test_frames_survive_any_fragmentation(parts: list[tuple[bytes, wire.Frame]], cuts: list[int]) -> None:
    raw, reader, got, at, turn = b"".join(p[0] for p in parts), wire.FrameReader(), [], 0, 0
    while at < len(raw):
        size = cuts[turn % len(cuts)]
        got += reader.feed(memoryview(raw)[at : at + size])
        at, turn = at + size, turn + 1
    assert joined(got) == joined([p[1] for p in parts])
    assert reader.between_frames


@given(st.binary(max_size=4000))
@settings(max_examples=300, deadline=None)
def test_garbage_gives_frames_or_a_wire_error(raw: bytes) -> None:
    reader = wire.FrameReader()
    try:
        for frame in reader.feed(raw):
            assert len(frame.payload) <= wire.MAX_CONTROL
    except wire.WireError:
        pass


@given(st.binary(max_size=600))
@settings(max_examples=300, deadline=None)
def test_any_payload_is_a_map_or_a_wire_error(payload: bytes) -> None:
    try:
        assert isinstance(wire.message(payload), dict)
    except wire.WireError:
        pass


@given(MAPS)
@settings(deadline=None)
def test_messages_round_trip(value: dict[str, object]) -> None:
    raw = wire.control(wire.RESULT, 1, value)
    assert wire.message(raw[wire.HEAD_BYTES :]) == value


@pytest.mark.parametrize(
    "raw",
    [
        wire.head(0, 1, 11),
        wire.head(wire.MAX_CONTROL + 1, 1, wire.EVENT),
        wire.head(wire.MAX_DATA + 2, 1, wire.DATA),
        wire.head(0, 1, wire.DATA),
        wire.head(4, 1, wire.CREDIT),
        wire.head(0, 0, wire.RESULT),
        wire.head(0, 7, wire.PING),
        wire.head(1, 1, wire.CANCEL),
        wire.head(65, 0, wire.PING),
        wire.head(5000, 0, wire.HELLO),
        wire.head(2, 1, wire.DATA) + b"\x03x",
        wire.head(1, 1, wire.EOF) + b"\x09",
    ],
)
def test_forbidden_frames_are_refused(raw: bytes) -> None:
    with pytest.raises(wire.WireError):
        wire.FrameReader().feed(raw)


def test_nesting_is_limited_before_decoding() -> None:
    deep = b"\x81\xa1a" * 40 + b"\xc0"
    with pytest.raises(wire.WireError, match="deeply"):
        wire.message(deep)
    with pytest.raises(wire.WireError):
        wire.message(b"\x91" * 100_000)
    assert wire.message(b"\x81\xa1a" * 31 + b"\xc0")


def test_huge_claimed_counts_cost_nothing() -> None:
    for payload in (
        b"\xdf\xff\xff\xff\xff",
        b"\xdd\xff\xff\xff\xff",
        b"\xc6\xff\xff\xff\xff",
        b"\x81\xa1a\xdf\xff\xff\xff\xff",
    ):
        with pytest.raises(wire.WireError):
            wire.message(payload)


def test_data_passes_without_being_collected() -> None:
    reader = wire.FrameReader()
    frames = reader.feed(wire.data_head(5, 1, wire.MAX_DATA) + b"x" * 10)
    assert frames == [wire.Frame(wire.DATA, 5, 1, b"x" * 10)]
    assert not reader.between_frames


@given(st.binary(max_size=40))
def test_names_of_any_bytes_round_trip(raw: bytes) -> None:
    assert wire.name(wire.text(raw)).encode("utf-8", "surrogateescape") == raw
