"""Image references: one canonical form for what people type, and nothing else accepted."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.errors import InvalidArgument
from atoll.images import Reference

DIGEST = "sha256:" + "ab" * 32


@pytest.mark.parametrize(
    ("typed", "canonical"),
    [
        ("python", "docker.io/library/python:latest"),
        ("python:3.12-alpine", "docker.io/library/python:3.12-alpine"),
        ("docker.io/python", "docker.io/library/python:latest"),
        ("index.docker.io/library/python:3", "docker.io/library/python:3"),
        ("nickblah/lua:5.4-alpine", "docker.io/nickblah/lua:5.4-alpine"),
        ("mcr.microsoft.com/dotnet/sdk:8.0", "mcr.microsoft.com/dotnet/sdk:8.0"),
        ("localhost/x", "localhost/x:latest"),
        ("localhost:5000/a/b/c:tag", "localhost:5000/a/b/c:tag"),
        ("127.0.0.1:5000/x", "127.0.0.1:5000/x:latest"),
        ("REGISTRY.Example.COM/x", "registry.example.com/x:latest"),
        (f"registry.example.com/a/b@{DIGEST}", f"registry.example.com/a/b@{DIGEST}"),
        (f"registry.example.com/a/b:1@{DIGEST}", f"registry.example.com/a/b:1@{DIGEST}"),
        ("a__b/c-d.e", "docker.io/a__b/c-d.e:latest"),
    ],
)
def test_reads_what_people_type(typed: str, canonical: str) -> None:
    reference = Reference.parse(typed)
    assert str(reference) == canonical
    assert Reference.parse(canonical) == reference


@pytest.mark.parametrize(
    "typed",
    [
        "", " ", "a b", "Python", "docker.io/Library/x", "x:", "x:ta/g", "x@sha256:abc", "x@md5:" + "0" * 32, "../x",
        "x/../y", "/x", "x/", "a//b", "http://x/y", "x:5000000/y:1", "host:99999/x", "host:0/x", "-x.com/y", "x\n", "x\0",
        "é", "a" * 257, "x@" + DIGEST + "x", ":tag", "@" + DIGEST, ".hidden/x",
    ],
)  # fmt: skip
def test_refuses_what_is_not_a_reference(typed: str) -> None:
    with pytest.raises(InvalidArgument):
        Reference.parse(typed)


def test_a_digest_wins_over_a_tag() -> None:
    """A tag can move; what is asked for is the digest."""
    reference = Reference.parse(f"registry.example.com/a/b:1@{DIGEST}")
    assert reference.version == DIGEST and Reference.parse("registry.example.com/a/b:1").version == "1"


@given(st.text(alphabet="abcXYZ019._-/:@", max_size=40))
def test_canonical_form_is_stable(text: str) -> None:
    """Whatever is accepted is spelled the same after being read again, and holds no path trick."""
    try:
        reference = Reference.parse(text)
    except InvalidArgument:
        return
    again = Reference.parse(str(reference))
    assert again == reference and ".." not in str(reference).split("/")
