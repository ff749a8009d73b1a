"""Addresses that a name may never lead to, as one explicit list.

`ipaddress.is_private` and `is_global` are not used: they change between Python versions, and they count documentation
ranges, which some machines use for public names, as private.
"""

import ipaddress
from collections.abc import Iterable

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Network = ipaddress.IPv4Network | ipaddress.IPv6Network

_REFUSED_V4: tuple[tuple[str, str], ...] = (
    ("0.0.0.0/8", "unspecified"),
    ("10.0.0.0/8", "private"),
    ("100.64.0.0/10", "carrier-grade NAT"),
    ("127.0.0.0/8", "loopback"),
    ("168.63.129.16/32", "metadata"),
    ("169.254.0.0/16", "link-local or metadata"),
    ("172.16.0.0/12", "private"),
    ("192.0.0.0/24", "protocol assignments"),
    ("192.88.99.0/24", "6to4 relay"),
    ("192.168.0.0/16", "private"),
    ("198.18.0.0/15", "benchmarking"),
    ("224.0.0.0/4", "multicast"),
    ("240.0.0.0/4", "reserved or broadcast"),
)
_REFUSED_V6: tuple[tuple[str, str], ...] = (
    ("::/128", "unspecified"),
    ("::1/128", "loopback"),
    ("::/96", "IPv4-compatible"),
    ("64:ff9b::/96", "NAT64"),
    ("64:ff9b:1::/48", "NAT64"),
    ("100::/64", "discard"),
    ("2001::/32", "Teredo"),
    ("2002::/16", "6to4"),
    ("fc00::/7", "unique local"),
    ("fe80::/10", "link-local"),
    ("fec0::/10", "site-local"),
    ("ff00::/8", "multicast"),
)
_V4 = tuple((ipaddress.IPv4Network(net), why) for net, why in _REFUSED_V4)
_V6 = tuple((ipaddress.IPv6Network(net), why) for net, why in _REFUSED_V6)
_TRANSLATED = ipaddress.IPv6Network("::ffff:0:0:0/96")


def refusal(address: str | Address, exceptions: Iterable[Network] = ()) -> str | None:
    """Why this address may not be dialled, or None when it may; `exceptions` are networks the operator named."""
    try:
        ip = ipaddress.ip_address(address) if isinstance(address, str) else address
    except ValueError:
        return "not an address"
    if isinstance(ip, ipaddress.IPv6Address):
        if ip.scope_id is not None:
            return "scoped address"
        if ip.ipv4_mapped is not None:
            ip = ip.ipv4_mapped
        elif ip in _TRANSLATED:
            ip = ipaddress.IPv4Address(int(ip) & 0xFFFFFFFF)
    if any(ip.version == net.version and ip in net for net in exceptions):
        return None
    if isinstance(ip, ipaddress.IPv4Address):
        return next((why for net, why in _V4 if ip in net), None)
    return next((why for net, why in _V6 if ip in net), None)


def refused_networks() -> tuple[Network, ...]:
    """Every refused network, for `doctor`, documentation and tests."""
    return tuple(net for net, _ in _V4) + tuple(net for net, _ in _V6)
