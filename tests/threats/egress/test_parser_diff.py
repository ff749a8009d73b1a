"""EGR-03: no spelling of an authority is read in two ways: what is matched is what is dialled, or it is refused."""

import itertools

import pytest

from atoll.egress.parse.http_head import HeadError, RequestGuard, parse_authority

GOOD = b"a.example"
PIECES = [
    b"", b" ", b"\t", b"\r", b"\n", b"\r\n", b"\0", b"@", b":", b"/", b"\\", b"?", b"#", b"[", b"]", b"%", b"%00", b"%2e",
    b",", b";", b"evil.example", b"@evil.example", b".evil.example", b":443", b":80", b":080", b":0", b":99999",
    b"\xe2\x80\xa4", b"\xff", b"..", b"*",
]  # fmt: skip
AUTHORITIES = [before + GOOD + after for before, after in itertools.product(PIECES[:16], PIECES)][:260]


@pytest.mark.parametrize("port", [80])
def test_authorities_mean_one_host_or_none(port: int) -> None:
    """Read each of more than 200 authority strings as exactly one name that stands in it, or refuse it."""
    assert len(AUTHORITIES) >= 200
    for raw in AUTHORITIES:
        try:
            host = parse_authority(raw, port)
        except HeadError:
            continue
        assert raw in (host.encode(), host.encode() + b":80", host.encode() + b":080", host.encode() + b"."), raw
        assert host in ("a.example", "a.example.evil.example", "a.exampleevil.example")


def test_heads_pass_unchanged_with_the_host_that_was_approved() -> None:
    """Forward exactly the bytes that were judged, for every authority in every place of a head."""
    for raw in AUTHORITIES:
        for head in (
            b"GET / HTTP/1.1\r\nHost: " + raw + b"\r\n\r\n",
            b"GET http://" + raw + b"/ HTTP/1.1\r\nHost: a.example\r\n\r\n",
            b"GET " + raw + b" HTTP/1.1\r\nHost: a.example\r\n\r\n",
        ):
            approved: list[str] = []
            guard = RequestGuard(80, approved.append)
            try:
                passed = guard.feed(head)
            except HeadError:
                continue
            if passed:
                assert passed == head[: len(passed)] and approved[0] == guard.host
                assert b"Host: " + approved[0].encode() in passed.replace(b"\t", b" ").replace(b":  ", b": ")
