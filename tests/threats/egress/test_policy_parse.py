"""EGR-13: absent, null and empty are three things, and what cannot be read is an error, never a wider list."""

from typing import Any

import pytest

from atoll.egress import EgressPolicy, parse_hosts
from atoll.egress.policy import MAX_ENTRIES
from atoll.errors import InvalidArgument

BAD = [
    "http://x", "https://example.com", "example.com/", "example.com/path", "a b", " a.b", "a.b ", "a\tb", "a\0.b",
    "a.b\n", "a.b\r\n", "", ".", "..", "a..b", ".a", "-a.b", "a-.b", "a_b.c", "user@a.b", "a.b:0", "a.b:65536",
    "a.b:-1", "a.b:x", "a.b:", "a.b:80:80", "a.b:٣", "a.b:0x50", "a.b:00000080", "[::1]", "::1", "1.2.3.4",
    "127.0.0.1", "2130706433", "0x7f.1", "10.0.0.0/8", "*.", "*.com", "*a.b", "a.*.b", "**", "*.*", "*.a.b.*", "?.b",
    "!a.b", "a.b,c.d", "x" * 64 + ".b", ".".join(["x" * 50] * 6), "a.b?", "a.b#", "a\\b", "xn--.b", "xn--zzzzzzzzz.b",
    "a\u202e.b", "\ud800.b", "a％.b", "☃ .b", "a.b\u3002\u3002c",
]  # fmt: skip


@pytest.mark.parametrize("entry", BAD, ids=[ascii(entry)[:30] for entry in BAD])
def test_malformed_hosts_are_errors(entry: str) -> None:
    """Raise InvalidArgument for an entry that is not exactly a host."""
    with pytest.raises(InvalidArgument):
        parse_hosts([entry])


@pytest.mark.parametrize("entries", [None, "a.b", b"a.b", 7, [None], [7], [b"a.b"], [["a.b"]], [{"host": "a.b"}], True])
def test_wrong_types_are_errors(entries: Any) -> None:
    """Raise InvalidArgument for anything but a list of strings; null is not a list."""
    with pytest.raises(InvalidArgument):
        parse_hosts(entries)


def test_too_many_entries_are_an_error() -> None:
    """Take up to the limit and not ten thousand."""
    assert len(parse_hosts([f"h{i}.example" for i in range(MAX_ENTRIES)])) == MAX_ENTRIES
    with pytest.raises(InvalidArgument):
        parse_hosts(f"h{i}.example" for i in range(10_000))


def test_empty_list_allows_nothing() -> None:
    """Read an empty list, and a default policy, as nothing."""
    for policy in (
        EgressPolicy(),
        EgressPolicy.of([]),
        EgressPolicy.from_dict({}),
        EgressPolicy.from_dict({"hosts": []}),
    ):
        assert not policy.decide("example.com").allowed
        assert not policy.decide("example.com", 443).allowed
        assert not policy.decide("host.atoll.internal", 80).allowed


@pytest.mark.parametrize("key", ["Hosts", "allow", "no_proxy", "bypass", "ports", ""])
def test_unknown_keys_are_errors(key: str) -> None:
    """Refuse a policy with a key that means nothing; no bypass list exists."""
    with pytest.raises(InvalidArgument):
        EgressPolicy.from_dict({"hosts": [], key: []})


def test_null_is_not_a_policy() -> None:
    """Refuse null where a list is meant."""
    for data in ({"hosts": None}, {"host_ports": [True]}, {"host_ports": ["80"]}, {"host_ports": [0]}):
        with pytest.raises(InvalidArgument):
            EgressPolicy.from_dict(data)


def test_private_networks_need_a_named_host() -> None:
    """Open a private network for a host, never for everybody."""
    for private in ({"*": ["10.0.0.0/8"]}, {"a.b": "10.0.0.0/8"}, {"a.b": ["ten"]}, {"a.b": ["10.0.0.1/8"]}):
        with pytest.raises(InvalidArgument):
            EgressPolicy.of(["a.b"], private=private)


@pytest.mark.parametrize(
    ("entry", "canonical"),
    [
        ("Example.COM", "example.com"),
        ("example.com.", "example.com"),
        ("bücher.example", "xn--bcher-kva.example"),
        ("ｇithub.com", "github.com"),
        ("straße.example", "xn--strae-oqa.example"),
        ("gіthub.com", "xn--gthub-n2e.com"),
        ("*.Bücher.example:8443", "*.xn--bcher-kva.example:8443"),
        ("a\u200b.example", "a.example"),
        ("*", "*"),
        ("*:443", "*:443"),
        ("localhost", "localhost"),
    ],
)
def test_names_are_brought_to_one_form(entry: str, canonical: str) -> None:
    """Normalise case, dots and IDNA; a look-alike becomes visibly another name."""
    assert EgressPolicy.of([entry]).hosts == (canonical,)
