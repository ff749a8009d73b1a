"""The parts of the surface that need no sandbox: signatures, frames, forms, routing, and output that is passed on."""

import asyncio
import struct
from collections.abc import AsyncIterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll import errors
from atoll.core.commands import output
from atoll.core.commands.output import TAIL, PassedOn
from atoll.surfaces.e2b.envd.connect import Fields, Frames, RpcError, decode
from atoll.surfaces.e2b.envd.multipart import Parts, boundary_of
from atoll.surfaces.e2b.routing import Place, find_place
from atoll.surfaces.e2b.tokens import is_signed, sign


def test_signatures_are_the_contracts() -> None:
    assert sign("/a", "read", "", "tok") == "v1_2/gNbgFPxFSqkheS/SD0NHlzA121E/nxkOtc/ovxeoI"
    expected = "v1_PJVO6h+BK+o1H5+n/R4IeufR75fIodZmDSpCGxXnQ0g"
    assert sign("/home/user/a b.txt", "write", "root", "tok", "1700000000") == expected
    asked = {"path": "/a", "signature": sign("/a", "read", "", "tok")}
    assert (
        is_signed(asked, "GET", "tok") and not is_signed(asked, "POST", "tok") and not is_signed(asked, "GET", "other")
    )


@pytest.mark.parametrize(
    ("host", "headers", "found"),
    [
        ("localhost:3676", {}, None), ("x-abc.localhost", {}, None), ("80-UPPER.localhost", {}, Place(80, "upper", True)),
        ("49983-abc.e2b.test", {}, Place(49983, "abc", True)), ("3000-abc.localhost:1", {}, Place(3000, "abc", True)),
        ("x", {"id": "abc", "port": "80"}, Place(80, "abc", False)), ("80-abc.x", {"id": "abc", "port": "80"}, Place(80, "abc", True)),
        ("80-abc.x", {"id": "abd", "port": "80"}, "wrong"), ("80-abc.x", {"id": "abc", "port": "81"}, "wrong"),
        ("x", {"id": "abc"}, "wrong"), ("x", {"id": "../x", "port": "80"}, "wrong"), ("x", {"id": "abc", "port": "٣"}, "wrong"),
        ("70000-abc.x", {}, "wrong"), ("0-abc.x", {}, "wrong"),
    ],
)  # fmt: skip
def test_where_a_request_leads(host: str, headers: dict[str, str], found: Place | str | None) -> None:
    sent = [(b"host", host.encode())] + [
        (f"e2b-sandbox-{name}".encode(), value.encode()) for name, value in headers.items()
    ]
    if found == "wrong":
        with pytest.raises(errors.InvalidArgument):
            find_place(sent)
    else:
        assert find_place(sent) == found


@settings(deadline=None, max_examples=40)
@given(st.lists(st.binary(max_size=40), max_size=6), st.lists(st.integers(1, 30), max_size=40))
def test_frames_come_whole_however_they_are_cut(messages: list[bytes], cuts: list[int]) -> None:
    data = b"".join(struct.pack(">BI", 0, len(one)) + one for one in messages)
    frames, found = Frames(), []
    while data:
        size = cuts.pop() if cuts else len(data)
        piece, data = data[:size], data[size:]
        found += frames.feed(piece)
    frames.finish()
    assert found == [(0, one) for one in messages]


def test_a_frame_that_is_cut_or_too_long_is_refused() -> None:
    cut = Frames()
    assert list(cut.feed(b"\0\0\0\0\5{}")) == []
    with pytest.raises(RpcError):
        cut.finish()
    with pytest.raises(RpcError):
        list(Frames().feed(b"\0\x7f\xff\xff\xff"))
    for wrong in (b"[]", b"1", b'"\\ud800"', b"{" * 100_000, b"\xff"):
        with pytest.raises(RpcError):
            decode(wrong)


def test_fields_take_either_case_and_alphabet() -> None:
    fields = Fields({"watcherId": "a", "include_entry": True, "data": "-_8", "size": "12", "gone": None})
    assert fields.text("watcher_id") == "a" and fields.flag("include_entry") is True
    assert fields.data("data") == b"\xfb\xff" and fields.whole("size") == 12 and fields.child("gone") is None


async def _pieces(data: bytes, cuts: list[int]) -> AsyncIterator[bytes]:
    while data:
        size = cuts.pop() if cuts else len(data)
        yield data[:size]
        data = data[size:]


NAMES = st.text(
    st.characters(codec="utf-8", exclude_characters='"\\\r\n%', exclude_categories=["Cc"]), min_size=1, max_size=8
)


@settings(deadline=None, max_examples=40)
@given(st.lists(st.tuples(NAMES, st.binary(max_size=60)), max_size=4), st.lists(st.integers(1, 20), max_size=60))
def test_forms_come_whole_however_they_are_cut(files: list[tuple[str, bytes]], cuts: list[int]) -> None:
    boundary = "xXx----boundary----xXx"
    body = b""
    for name, data in files:
        head = f'--{boundary}\r\nContent-Disposition: form-data; name="file"; filename="{name}"\r\n\r\n'
        body += head.encode() + data + b"\r\n"
    body += (
        f'--{boundary}\r\nContent-Disposition: form-data; name="other"\r\n\r\nnot read\r\n--{boundary}--\r\n'.encode()
    )

    async def read() -> list[tuple[str, bytes]]:
        parts = Parts(_pieces(body, list(cuts)), boundary_of(f"multipart/form-data; boundary={boundary}"))
        return [(name, b"".join([piece async for piece in parts.data()])) async for name in parts.parts()]

    assert asyncio.run(read()) == files


async def test_a_reader_that_lags_slows_the_command_and_loses_nothing() -> None:
    passed = PassedOn(awaited=True)
    sent = [bytes([number % 251]) * 60_000 for number in range(60)]

    async def produce() -> None:
        for data in sent:
            passed.add(1, data)
            await passed.room()
        passed.finish()
        passed.let_go()

    task = asyncio.create_task(produce())
    await asyncio.sleep(0.05)
    assert not task.done(), "it waits for who started it"
    found = bytearray()
    async for _, _, data in passed.follow({1: 0, 2: 0}):
        found += data
        await asyncio.sleep(0.001)
    await task
    assert bytes(found) == b"".join(sent)


async def test_a_reader_that_is_stuck_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output, "STUCK", 0.2)
    passed = PassedOn(awaited=False)
    stuck = passed.follow({1: 0, 2: 0})
    passed.add(1, b"first")
    assert (await anext(stuck))[2] == b"first"
    passed.add(1, b"x" * TAIL)
    async with asyncio.timeout(30):
        await passed.room()
    with pytest.raises(errors.Exhausted):
        async for _ in stuck:
            pass
    late = [data async for _, _, data in _ended(passed).follow({1: -1, 2: -1})]
    assert late == [], "there is no replay"


def _ended(passed: PassedOn) -> PassedOn:
    passed.finish()
    return passed
