"""Cookies at addresses of one origin that differ only in their path.

A browser keeps cookies by host name: it would give a sandbox those of every other sandbox and of every other server on this
machine's loopback, whatever their port. So towards a browser the names of a sandbox's cookies get a mark that follows from its
secret, and only what bears the mark is passed on, without it. Programs that are no browser say what they mean.
"""

import hashlib

Headers = list[tuple[bytes, bytes]]


def is_browser(headers: Headers) -> bool:
    """By what pages cannot take off a request; every browser has called itself Mozilla for thirty years."""
    return any(
        name.startswith(b"sec-fetch-") or (name == b"user-agent" and value.startswith(b"Mozilla/"))
        for name, value in headers
    )


def inward(headers: Headers, prefix: str) -> Headers:
    """A browser's request as the sandbox below this prefix may see it."""
    mark, kept = _mark(prefix), []
    for name, value in headers:
        if name == b"cookie":
            own = [pair[len(mark) :] for part in value.split(b";") if (pair := part.strip()).startswith(mark)]
            if own:
                kept.append((name, b"; ".join(own)))
        else:
            kept.append((name, value))
    return kept


def outward(headers: Headers, prefix: str) -> Headers:
    """The sandbox's answer as the browser may see it."""
    return [(name, _confined(value, prefix) if name == b"set-cookie" else value) for name, value in headers]


def _confined(value: bytes, prefix: str) -> bytes:
    pair, *attributes = (part.strip() for part in value.split(b";"))
    place, kept = b"/", []
    for attribute in attributes:
        name, _, text = attribute.partition(b"=")
        if name.strip().lower() == b"path":
            place = text.strip() if text.strip().startswith(b"/") else b"/"
        elif name.strip().lower() != b"domain":
            kept.append(attribute)
    return b"; ".join([_mark(prefix) + pair, *kept, b"Path=" + prefix.encode("latin-1") + place])


def _mark(prefix: str) -> bytes:
    return hashlib.sha256(b"cookies of " + prefix.encode("latin-1")).hexdigest()[:16].encode() + b"."
