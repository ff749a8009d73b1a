"""The three parsers that read what sandboxes send: exact on what is good, closed on all else, and never surprised."""

import ipaddress
import socket
import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lab.hellos import alpn, body, client_hello, handshake, hello_for, records, retry_request, sni

from atoll.egress.names import BadName, from_wire
from atoll.egress.parse import dns
from atoll.egress.parse.hello import MAX_EARLY, MIN_RECORD, HelloError, HelloReader, is_retry, read_hello
from atoll.egress.parse.http_head import HeadError, RequestGuard
from atoll.egress.router.nflog import parse_log

FUZZ = settings(max_examples=300, deadline=None, database=None)
QUERY = struct.pack("!6H", 7, 0x0100, 1, 0, 0, 0) + b"\1a\7example\0\0\1\0\1"


def mutated(good: bytes) -> st.SearchStrategy[bytes]:
    """Good bytes with a few places changed, cut or grown."""

    def apply(edits: list[tuple[int, int]], cut: int, tail: bytes) -> bytes:
        data = bytearray(good)
        for at, value in edits:
            data[at % len(data)] = value
        return bytes(data[: cut % (len(data) + 1)] if cut else data) + tail

    edits = st.lists(st.tuples(st.integers(0, 4096), st.integers(0, 255)), max_size=6)
    return st.builds(apply, edits, st.just(0) | st.integers(0, 4096), st.binary(max_size=8))


# DNS


def test_query_and_response_round_trip() -> None:
    """Read a question and answer it in the form resolvers read."""
    query = dns.parse_query(QUERY)
    assert (query.name, query.kind) == (b"a.example", dns.A)
    reply = dns.build_response(query, dns.NOERROR, ("203.0.113.1", "203.0.113.2"), 30)
    answer = dns.parse_answer(reply, 7, b"a.example")
    assert answer == dns.Answer(dns.NOERROR, ("203.0.113.1", "203.0.113.2"), 30)


def test_aliases_are_followed_and_strangers_ignored() -> None:
    """Follow CNAMEs from the name asked; take no address of another name."""
    alias = b"\xc0\x0c" + struct.pack("!HHIH", 5, 1, 20, 4) + b"\1b\xc0\x0e"
    target = b"\1b\xc0\x0e" + struct.pack("!HHIH", 1, 1, 90, 4) + bytes((203, 0, 113, 5))
    stranger = b"\1z\xc0\x0e" + struct.pack("!HHIH", 1, 1, 90, 4) + bytes((203, 0, 113, 6))
    packet = struct.pack("!6H", 7, 0x8180, 1, 3, 0, 0) + QUERY[12:] + stranger + target + alias
    assert dns.parse_answer(packet, 7, b"a.example") == dns.Answer(0, ("203.0.113.5",), 20)


@pytest.mark.parametrize("change", [(0, 9), (2, 0x01), (13, 0x42), (24, 28)])
def test_answer_to_another_question_is_refused(change: tuple[int, int]) -> None:
    """Take no answer with another id, letter case or type, and no query."""
    reply = bytearray(dns.build_response(dns.parse_query(QUERY), 0, ("203.0.113.1",), 1))
    reply[change[0]] = change[1]
    with pytest.raises(dns.DnsError):
        dns.parse_answer(bytes(reply), 7, b"a.example")


def test_pointer_loops_end() -> None:
    """Refuse pointers that point at themselves or forward."""
    head = struct.pack("!6H", 7, 0x8180, 1, 1, 0, 0) + QUERY[12:]
    for target in (len(head), len(head) + 2, 0x3FFF):
        with pytest.raises(dns.DnsError):
            dns.parse_answer(head + struct.pack("!H", 0xC000 | target) + bytes(10), 7, b"a.example")


@FUZZ
@given(st.binary(max_size=600) | mutated(QUERY))
def test_dns_parsers_never_fail_otherwise(packet: bytes) -> None:
    """Give a query, or DnsError, for any bytes."""
    try:
        query = dns.parse_query(packet)
    except dns.DnsError:
        error = dns.build_error(packet, dns.FORMERR)
        assert error is None or error[:2] == packet[:2]
    else:
        assert dns.build_response(query, 3)[:2] == packet[:2]
        try:
            from_wire(query.name)
        except BadName:
            pass


@FUZZ
@given(mutated(dns.build_response(dns.parse_query(QUERY), 0, ("203.0.113.1",) * 3, 30)))
def test_dns_answers_never_fail_otherwise(packet: bytes) -> None:
    """Give an answer, or DnsError, for any bytes from upstream."""
    try:
        answer = dns.parse_answer(packet, 7, b"a.example")
    except dns.DnsError:
        return
    assert all(len(address.split(".")) == 4 for address in answer.addresses)


SIX = (
    struct.pack("!6H", 7, 0x8180, 1, 2, 0, 0) + QUERY[12:-4] + struct.pack("!HH", 28, 1)
    + 2 * (b"\xc0\x0c" + struct.pack("!HHIH", 28, 1, 30, 16) + socket.inet_pton(socket.AF_INET6, "2001:db8::1"))
)  # fmt: skip


def test_ipv6_answers_are_read() -> None:
    """Take AAAA records for an AAAA question, and for no other."""
    assert dns.parse_answer(SIX, 7, b"a.example", dns.AAAA) == dns.Answer(0, ("2001:db8::1",), 30)
    with pytest.raises(dns.DnsError):
        dns.parse_answer(SIX, 7, b"a.example")


@FUZZ
@given(mutated(SIX))
def test_ipv6_answers_never_fail_otherwise(packet: bytes) -> None:
    """Give an answer, or DnsError, for any bytes from upstream."""
    try:
        answer = dns.parse_answer(packet, 7, b"a.example", dns.AAAA)
    except dns.DnsError:
        return
    assert all(ipaddress.IPv6Address(address) for address in answer.addresses)


@FUZZ
@given(st.binary(max_size=200))
def test_packet_log_parser_never_fails(data: bytes) -> None:
    """Read any log message without an error."""
    list(parse_log(data))


# ClientHello


def test_good_hello_is_read_whole() -> None:
    """Find name and protocols, and where the hello ends."""
    data = client_hello(sni(b"A.Example"), alpn(b"h2", b"http/1.1"))
    found = read_hello(data + b"early data")
    assert found is not None
    assert (found.name, found.alpn, found.size) == ("a.example", ("h2", "http/1.1"), len(data))


@FUZZ
@given(st.integers(MIN_RECORD, 300), st.integers(2, 50), st.data())
def test_no_split_changes_the_result(record: int, step: int, data: st.DataObject) -> None:
    """Read the same name from any record size and in any pieces, and nothing from any proper prefix."""
    hello = client_hello(sni(b"a.example"), (10, b"\0\4\0\x1d\0\x17"), (21, bytes(200)), size=record)
    found = read_hello(hello)
    assert found is not None and found.name == "a.example" and found.size == len(hello)
    assert read_hello(hello[: data.draw(st.integers(0, len(hello) - 1))]) is None
    reader = HelloReader()
    answers = [reader.feed(hello[at : at + step]) for at in range(0, len(hello), step)]
    assert answers[-1] == found and not any(answers[:-1])


@pytest.mark.parametrize("record", [1, 2, 3, 4, 5, 63])
def test_tiny_records_are_refused(record: int) -> None:
    """Refuse a hello in records smaller than any TLS library sends, all but the last."""
    with pytest.raises(HelloError, match="too small"):
        read_hello(client_hello(sni(b"a.example"), (21, bytes(200)), size=record))


def test_early_data_is_bounded() -> None:
    """Hold no more than a bounded amount of rejected early data, also while a record is incomplete."""
    reader, record = HelloReader(again=True), b"\x17\x03\x03\x41\x00" + bytes(16640)
    with pytest.raises(HelloError, match="early data"):
        reader.feed(record[:100])
        for _ in range(100):
            reader.feed(record[100:] + record[:100])
    assert len(reader.data) < 2 * MAX_EARLY


def test_pieces_are_bounded() -> None:
    """Refuse a hello that comes in more pieces than segments could explain."""
    reader, hello = HelloReader(), client_hello(sni(b"a.example"), (21, bytes(2000)))
    with pytest.raises(HelloError, match="pieces"):
        for at in range(len(hello)):
            reader.feed(hello[at : at + 1])


@FUZZ
@given(st.binary(max_size=400) | mutated(hello_for("a.example")))
def test_hello_parser_never_fails_otherwise(data: bytes) -> None:
    """Give a hello, "more" or HelloError for any bytes; a name that is read stands in them."""
    for again in (False, True):
        try:
            found = read_hello(data, again=again)
        except HelloError:
            continue
        if found is not None:
            assert found.name.encode() in data.lower()


def test_second_hello_may_follow_a_change_of_cipher() -> None:
    """Read the hello after a retry behind one ChangeCipherSpec and early data, and only there."""
    change = b"\x14\x03\x03\x00\x01\x01"
    early = b"\x17\x03\x03\x00\x03abc"
    hello = hello_for("a.example")
    found = read_hello(change + early + hello, again=True)
    assert found is not None and found.size == len(change + early + hello)
    for bad in (change + change + hello, b"\x14\x03\x03\x00\x00" + hello, b"\x15\x03\x03\x00\x02\x02\x28" + hello):
        with pytest.raises(HelloError):
            read_hello(bad, again=True)
    with pytest.raises(HelloError):
        read_hello(change + hello)


def test_retry_request_is_told_from_a_hello() -> None:
    """Recognise a HelloRetryRequest by its fixed random."""
    assert is_retry(retry_request())
    assert not is_retry(records(handshake(body(), kind=2)))


# HTTP


def passed(data: bytes, step: int) -> tuple[bytes, list[str], str]:
    """What the guard lets through when fed in steps, the hosts it saw, and why it stopped."""
    hosts: list[str] = []
    guard, out = RequestGuard(80, hosts.append), b""
    try:
        for at in range(0, len(data), step):
            out += guard.feed(data[at : at + step])
    except HeadError as err:
        return out, hosts, str(err)
    return out, hosts, ""


REQUESTS = (
    b"GET /a HTTP/1.1\r\nHost: a.example\r\n\r\n"
    b"POST /b HTTP/1.1\r\nHost: b.example\r\nContent-Length: 11\r\n\r\nGET / HTTP/1"
    b"HEAD /c HTTP/1.1\r\nHost: c.example:80\r\nX: \xff\r\n\r\n"
)
CHUNKED = (
    b"POST / HTTP/1.1\r\nHost: a.example\r\nTransfer-Encoding: Chunked\r\n\r\n"
    b"5\r\nhello\r\n1f ; x=y\r\n" + b"GET / HTTP/1.1\r\nHost: evil\r\n\r\n " + b"\r\n0\r\nT: v\r\n\r\n"
    b"GET http://b.example/x HTTP/1.1\r\nHost: b.example\r\n\r\n"
)


@pytest.mark.parametrize("step", [1, 3, 1000])
def test_bodies_are_followed_to_the_next_head(step: int) -> None:
    """Find each head after a body of known length, and take nothing in a body for one."""
    good = REQUESTS.replace(b"GET / HTTP/1HEAD", b"GET / HTTP/HEAD")
    assert passed(good, step) == (good, ["a.example", "b.example", "c.example"], "")
    assert passed(CHUNKED, step) == (CHUNKED, ["a.example", "b.example"], "")


def test_body_that_is_too_long_is_no_head() -> None:
    """Refuse what follows a body and is not a request."""
    assert passed(REQUESTS, 1000)[2] == "not HTTP"


@FUZZ
@given(st.binary(max_size=300) | mutated(REQUESTS) | mutated(CHUNKED), st.integers(1, 50))
def test_guard_never_fails_otherwise(data: bytes, step: int) -> None:
    """Pass a prefix of the input unchanged, the same for every way of cutting it."""
    out, hosts, why = passed(data, step)
    assert data.startswith(out)
    whole, all_hosts, all_why = passed(data, max(len(data), 1))
    assert hosts == all_hosts
    assert bool(why) == bool(all_why) or "upgrade" in why + all_why
    if not why:
        assert out == whole


@pytest.mark.parametrize("size", [70_000, 1_000_000])
def test_endless_head_is_refused(size: int) -> None:
    """Hold no more than a bounded head."""
    assert passed(b"GET / HTTP/1.1\r\nX: " + b"a" * size, 4096)[2] == "request head too large"
    assert passed(b"GET / HTTP/1.1\r\nHost: a.example\r\nTransfer-Encoding: chunked\r\n\r\n1;" + b"a" * size, 4096)[2]
