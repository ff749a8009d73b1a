"""EGR-02: names are letters, digits and hyphens on the byte level, before anything is matched."""

import pytest
from lab.internet import World

from atoll.egress.names import BadName, from_wire

HOSTILE = [
    b"evil.example\0.a.example",
    b"a.example\0",
    b"\0a.example",
    b"a..example",
    b".a.example",
    b"",
    b".",
    b"a.example..",
    b"-a.example",
    b"a-.example",
    b"a_b.example",
    b"a.exam ple",
    b"a.example\r\n",
    b"a.ex\xc3\xa4mple",
    b"a.example\xff",
    b"x" * 64 + b".example",
    b".".join([b"x" * 60] * 5),
    b"x" * 256,
    b"127.0.0.1",
    b"2130706433",
    b"0x7f.0x1",
    b"[::1]",
    b"a.example:443",
    b"user@a.example",
]


@pytest.mark.parametrize("raw", HOSTILE)
def test_hostile_name_is_no_name(raw: bytes) -> None:
    """Refuse every byte string that is not exactly a host name."""
    with pytest.raises(BadName):
        from_wire(raw)


def test_case_and_trailing_dot_have_one_form() -> None:
    """Give one canonical form to names that mean the same."""
    assert from_wire(b"A.Example.") == from_wire(b"a.EXAMPLE") == "a.example"


@pytest.mark.parametrize("raw", [b"evil.example\0.a.example", b"a.example\0", b"a_b.a.example", b"\xff.a.example"])
def test_resolver_never_passes_on_an_odd_name(world: World, raw: bytes) -> None:
    """Answer NXDOMAIN to names with odd bytes in a label, without asking upstream."""
    before = len(world.inet.queries)
    with world.sandbox("*.a.example", "a.example") as box:
        assert box.ask(raw)[0] == 3
        box.event("not a host name")
    assert len(world.inet.queries) == before
