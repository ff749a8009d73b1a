"""Host names: one canonical form, and the only two ways to get it.

`canonical` reads what people write (policy entries, any Unicode) and `from_wire` what a sandbox sends (bytes in DNS
packets, TLS hellos and HTTP heads). Both give a lower-case A-label name without a trailing dot, or fail. Matching and
dialling use nothing else, so two layers can never read one name in two ways.
"""

import re

import idna

from atoll.errors import InvalidArgument

MAX_NAME = 253
_LABEL = re.compile(rb"[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?\Z")


class BadName(ValueError):
    """The bytes are not a host name."""


def from_wire(raw: bytes) -> str:
    """The canonical form of a name a sandbox sent, or BadName."""
    if raw.endswith(b"."):
        raw = raw[:-1]
    if not raw or len(raw) > MAX_NAME:
        raise BadName("empty or too long")
    raw = raw.lower()
    labels = raw.split(b".")
    for label in labels:
        if _LABEL.match(label) is None:
            raise BadName("not letters, digits and hyphens")
    # A last label of digits, or 0x..., is an address to some parsers and a name to others.
    if labels[-1].isdigit() or labels[-1].startswith(b"0x"):
        raise BadName("an address, not a name")
    return raw.decode("ascii")


def canonical(text: str) -> str:
    """The canonical form of a name a person wrote, with IDNA applied, or InvalidArgument."""
    if not isinstance(text, str):
        raise InvalidArgument("a host must be a string")
    if len(text) > 4 * MAX_NAME:
        raise InvalidArgument("a host name is longer than 253 characters")
    try:
        ascii_form = text if text.isascii() else idna.encode(text, uts46=True, std3_rules=True).decode("ascii")
        name = from_wire(ascii_form.encode("ascii"))
        for label in name.split("."):
            if label.startswith("xn--"):
                idna.ulabel(label)
    except (BadName, idna.IDNAError, UnicodeError) as err:
        raise InvalidArgument(
            f"{text!r} is not a host name ({err})",
            hint="give a plain name such as example.com or *.example.com: no scheme, path, spaces or address",
        ) from None
    return name
