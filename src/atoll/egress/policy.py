"""The hosts one sandbox may reach, and the single function that decides it.

No policy at all (None, kept by the caller) means no network interface. A policy without rules means an interface that
leads nowhere. There is no third way to say "everything": `*` has to be written.
"""

import ipaddress
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Final, NotRequired, TypedDict

from atoll.egress import presets, requests
from atoll.egress.addresses import Network
from atoll.egress.names import BadName, canonical, from_wire
from atoll.egress.requests import Request, Requests
from atoll.errors import InvalidArgument

HOST_NAME: Final = "host.atoll.internal"
WEB_PORTS: Final = (443, 80)
GIT_PORT: Final = 22
MAX_ENTRIES: Final = 1024
MAX_HOST_PORTS: Final = 64
ANY_PORT: Final = None


@dataclass(frozen=True, slots=True)
class HostRule:
    """One entry: an exact name, a `*.suffix`, or `*`; without a port it opens the default ones of the name. With
    `requests` it opens its port for these alone."""

    name: str
    port: int | None = None
    requests: Requests | None = None

    def covers(self, name: str) -> bool:
        if self.name == "*":
            return _is_public(name)
        if self.name.startswith("*."):
            return name.endswith(self.name[1:]) and len(name) > len(self.name) - 1
        return name == self.name

    def ports_of(self, name: str) -> tuple[int, ...] | None:
        """The ports open for `name`, which this rule covers; None is every port."""
        if self.port is not None:
            return (self.port,)
        if self.name == "*":
            return ANY_PORT
        return (*WEB_PORTS, GIT_PORT) if name in presets.git_hosts() else WEB_PORTS

    def __str__(self) -> str:
        if self.requests is not None and self.port is not None:
            return requests.show(self.name, self.port, self.requests)
        return self.name if self.port is None else f"{self.name}:{self.port}"


@dataclass(frozen=True, slots=True)
class Verdict:
    """The answer of `decide`: allowed, or a reason; `exceptions` are networks the operator opened for this name."""

    allowed: bool
    reason: str = ""
    exceptions: tuple[Network, ...] = ()
    host_access: bool = False


class PolicyFields(TypedDict):
    """A policy as JSON holds it."""

    hosts: list[str]
    private: dict[str, list[str]]
    host_ports: list[int]
    held: NotRequired[list[str]]


@dataclass(frozen=True, slots=True)
class EgressPolicy:
    """Allowed hosts, the operator's private networks per host, loopback ports of the machine, and patterns of names to
    which a connection waits until somebody has approved it. The last only narrow what the first allow."""

    rules: tuple[HostRule, ...] = ()
    private: tuple[tuple[str, tuple[Network, ...]], ...] = ()
    host_ports: frozenset[int] = frozenset()
    held: tuple[str, ...] = ()

    @classmethod
    def of(
        cls,
        hosts: Iterable[str] = (),
        *,
        private: Mapping[str, Iterable[str]] | None = None,
        host_ports: Iterable[int] = (),
        held: Iterable[str] = (),
    ) -> "EgressPolicy":
        """A policy from what people write; InvalidArgument names the first bad entry."""
        patterns = tuple(dict.fromkeys(held_pattern(one) for one in held))
        return cls(parse_hosts(hosts), _parse_private(private or {}), _parse_host_ports(host_ports), patterns)

    def decide(self, name: str, port: int | None = None) -> Verdict:
        """May this sandbox speak to `name` on `port`? Without a port: may it be resolved at all?"""
        try:
            name = from_wire(name.encode("ascii"))
        except (BadName, UnicodeError):
            return Verdict(False, "not a host name")
        if name == HOST_NAME:
            if not self.host_ports or (port is not None and port not in self.host_ports):
                return Verdict(False, "this port of the host is not open to the sandbox")
            return Verdict(True, host_access=True)
        if name in presets.never_hosts():
            return Verdict(False, "metadata services are never reachable")
        covering = [rule for rule in self.rules if rule.covers(name)]
        if not covering:
            return Verdict(False, "not an allowed host")
        if port is not None and not any(_open(rule.ports_of(name), port) for rule in covering):
            return Verdict(False, f"port {port} is not open for this host")
        return Verdict(True, exceptions=self._exceptions(name))

    def waits(self, name: str) -> bool:
        """Does a connection to this name, which is in canonical form, need somebody's approval?"""
        return any(fnmatchcase(name, pattern) for pattern in self.held)

    def narrowed(self, name: str, port: int) -> bool:
        """Is the port open for some requests only?"""
        open_here = [rule for rule in self.rules if rule.covers(name) and _open(rule.ports_of(name), port)]
        return bool(open_here) and all(rule.requests is not None for rule in open_here)

    def permits(self, name: str, port: int, request: Request) -> bool:
        """May this request be sent to a name and port that are open?"""
        open_here = [rule for rule in self.rules if rule.covers(name) and _open(rule.ports_of(name), port)]
        return any(rule.requests is None or rule.requests.permits(request) for rule in open_here)

    def ports(self, name: str) -> tuple[int, ...] | None:
        """Every port open for `name`, sorted; None is any port, an empty tuple is no port."""
        if name == HOST_NAME:
            return tuple(sorted(self.host_ports))
        found: set[int] = set()
        for rule in self.rules:
            if rule.covers(name):
                ports = rule.ports_of(name)
                if ports is None:
                    return ANY_PORT
                found.update(ports)
        return tuple(sorted(found))

    def by_wildcard(self, name: str) -> bool:
        """Is the name allowed only by a pattern, so that the sandbox chose a part of it?"""
        return name != HOST_NAME and not any(rule.name == name for rule in self.rules)

    def _exceptions(self, name: str) -> tuple[Network, ...]:
        return tuple(net for host, nets in self.private if HostRule(host).covers(name) for net in nets)

    @property
    def hosts(self) -> tuple[str, ...]:
        """The rules in the form `parse_hosts` reads."""
        return tuple(str(rule) for rule in self.rules)

    def to_dict(self) -> PolicyFields:
        fields: PolicyFields = {
            "hosts": list(self.hosts),
            "private": {host: [str(net) for net in nets] for host, nets in self.private},
            "host_ports": sorted(self.host_ports),
        }
        if self.held:
            fields["held"] = list(self.held)
        return fields

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "EgressPolicy":
        """The inverse of `to_dict`; an unknown key is an error, never ignored."""
        unknown = set(data) - {"hosts", "private", "host_ports", "held"}
        if unknown:
            raise InvalidArgument(f"unknown key in an egress policy: {sorted(unknown)[0]!r}")
        return cls.of(
            data.get("hosts", ()),
            private=data.get("private"),
            host_ports=data.get("host_ports", ()),
            held=data.get("held", ()),
        )


def parse_hosts(entries: Iterable[str]) -> tuple[HostRule, ...]:
    """Rules from `name`, `*.suffix` or `*`, each with an optional `:port`; what any rule opens is open."""
    if isinstance(entries, str | bytes) or not isinstance(entries, Iterable):
        raise InvalidArgument("hosts must be a list of strings")
    rules: dict[HostRule, None] = {}
    for count, entry in enumerate(entries, start=1):
        if count > MAX_ENTRIES:
            raise InvalidArgument(f"more than {MAX_ENTRIES} hosts in one list", hint="use *.suffix entries")
        rules[_parse_entry(entry)] = None
    return tuple(rules)


def held_pattern(text: str) -> str:
    """A pattern of names in the form names have; one that could never match a name is an error, never a rule that
    silently holds nothing."""
    if not ("*" in text or "?" in text):
        return canonical(text)
    pattern = text.lower().removesuffix(".")
    if not pattern.isascii() or not all(c.isalnum() or c in "-.*?" for c in pattern) or ".." in pattern:
        raise InvalidArgument(
            f"{text[:80]!r} matches no host name",
            hint="a name with * and ? in it, such as *.example.com: no port, no scheme",
        )
    return pattern


def _parse_entry(entry: object) -> HostRule:
    if not isinstance(entry, str):
        raise InvalidArgument("a host must be a string", details={"host": repr(entry)[:80]})
    if " http://" in entry:
        name, http_port, narrow = requests.parse(entry)
        if name == "*":
            raise InvalidArgument(f"{entry[:80]!r}: rules for requests need a named host")
        return HostRule(_parse_entry(name).name, http_port, narrow)
    host, colon, port_text = entry.partition(":")
    port = _parse_port(port_text, entry) if colon else None
    if host == "*":
        return HostRule("*", port)
    if host.startswith("*."):
        suffix = canonical(host[2:])
        if "." not in suffix:
            raise InvalidArgument(f"{entry!r} covers a whole top-level domain", hint="name at least two labels")
        return HostRule("*." + suffix, port)
    return HostRule(canonical(host), port)


def _parse_port(text: str, entry: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) <= 5 and 1 <= int(text) <= 65535):
        raise InvalidArgument(
            f"{entry[:80]!r} is not a host: expected NAME or NAME:PORT with a port from 1 to 65535",
            hint="give a plain name such as example.com or *.example.com: no scheme, path, spaces or address",
        )
    return int(text)


def _parse_private(private: Mapping[str, Iterable[str]]) -> tuple[tuple[str, tuple[Network, ...]], ...]:
    parsed = []
    for host, networks in private.items():
        rule = _parse_entry(host)
        if rule.name == "*" or rule.port is not None or rule.requests is not None or isinstance(networks, str):
            raise InvalidArgument(f"a private network needs a named host and a list of networks, not {host!r}")
        try:
            parsed.append((rule.name, tuple(ipaddress.ip_network(net) for net in networks)))
        except ValueError as err:
            raise InvalidArgument(f"private network of {host!r}: {err}") from None
    return tuple(parsed)


def _parse_host_ports(ports: Iterable[int]) -> frozenset[int]:
    found = frozenset(ports)
    for port in found:
        if not isinstance(port, int) or isinstance(port, bool) or not 1 <= port <= 65535:
            raise InvalidArgument(f"{port!r} is not a port from 1 to 65535")
    if len(found) > MAX_HOST_PORTS:
        raise InvalidArgument(f"more than {MAX_HOST_PORTS} host ports")
    return found


def _open(ports: tuple[int, ...] | None, port: int) -> bool:
    return ports is None or port in ports


def _is_public(name: str) -> bool:
    last = name.rpartition(".")[2]
    return "." in name and last not in presets.not_public_suffixes()
