"""The rules of the router namespace, and libnftables to load them without starting a program.

Order of a packet's life there, all in prerouting, since nothing is ever forwarded:
  guard    raw      the pair (interface, source address) must be a registered one, else dropped
  steer    dstnat   DNS goes to the resolver; TCP to an address granted to this interface goes to the broker
  verdict  after    what was steered passes, within rates; other TCP is logged and reset; the rest logged and dropped
"""

import ctypes
import ipaddress
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final

from atoll.errors import Internal, Unsupported

DNS_PORT: Final = 53
BROKER_PORT: Final = 1
LOG_GROUP: Final = 7
TO_BROKER, TO_RESOLVER = 1, 2

UDP_SECONDS, CLOSED_SECONDS = 5, 1  # how long the connection table keeps a DNS packet and a closed connection


@dataclass(frozen=True, slots=True)
class TableShare:
    """One sandbox's share of the kernel's connection table, which all sandboxes share: open connections, DNS packets and
    new connections a second, and how many of these at once."""

    connections: int
    dns_rate: int
    dns_burst: int
    syn_rate: int
    syn_burst: int

    @classmethod
    def of(cls, size: int, links: int) -> "TableShare":
        """The share of each of `links` in a table of `size`: all of them together leave an eighth of it free."""
        share = size * 7 // 8 // links
        return cls(
            connections=max(1, min(4000, share // 2)),
            dns_rate=max(1, min(100, share // 8 // UDP_SECONDS)),
            dns_burst=max(1, min(500, share // 8)),
            syn_rate=max(1, min(100, share // 8 // CLOSED_SECONDS)),
            syn_burst=max(1, min(256, share // 8)),
        )

    @property
    def entries(self) -> int:
        """The most entries of the table that this comes to."""
        dns = self.dns_burst + self.dns_rate * UDP_SECONDS
        return self.connections + dns + self.syn_burst + self.syn_rate * CLOSED_SECONDS

    @property
    def chain(self) -> str:
        """The rules for what was steered to broker or resolver."""
        dns = f"limit rate over {self.dns_rate}/second burst {self.dns_burst} packets"
        syn = f"limit rate over {self.syn_rate}/second burst {self.syn_burst} packets"
        return f"""chain admit {{
    meta l4proto udp update @dns_rate {{ iifname {dns} }} drop
    ct state new tcp flags syn update @syn_rate {{ iifname {syn} }} drop
    ct state new meta l4proto tcp add @open {{ iifname ct count over {self.connections} }} reject with tcp reset
    accept
  }}"""


RULESET: Final = f"""
table inet atoll {{
  set members {{ type ifname . ipv4_addr; size 65536; }}
  set granted {{ type ifname . ipv4_addr . inet_service; size 1048576; flags timeout; }}
  set granted_any {{ type ifname . ipv4_addr; size 1048576; flags timeout; }}
  set dns_rate {{ type ifname; size 65536; flags dynamic,timeout; timeout 1m; }}
  set syn_rate {{ type ifname; size 65536; flags dynamic,timeout; timeout 1m; }}
  set log_rate {{ type ifname; size 65536; flags dynamic,timeout; timeout 1m; }}
  set open {{ type ifname; size 65536; flags dynamic; }}
  chain guard {{
    type filter hook prerouting priority raw; policy drop;
    iifname . ip saddr @members accept
    meta nfproto ipv6 drop
    update @log_rate {{ iifname limit rate 20/second burst 200 packets }} log prefix "spoofed" group {LOG_GROUP}
  }}
  chain steer {{
    type nat hook prerouting priority dstnat; policy accept;
    meta l4proto {{ tcp, udp }} th dport {DNS_PORT} ct mark set {TO_RESOLVER} redirect to :{DNS_PORT}
    iifname . ip daddr . tcp dport @granted ct mark set {TO_BROKER} redirect to :{BROKER_PORT}
    meta l4proto tcp iifname . ip daddr @granted_any ct mark set {TO_BROKER} redirect to :{BROKER_PORT}
  }}
  chain verdict {{
    type filter hook prerouting priority dstnat + 10; policy drop;
    ct mark {{ {TO_BROKER}, {TO_RESOLVER} }} goto admit
    update @log_rate {{ iifname limit rate 20/second burst 200 packets }} log prefix "refused" group {LOG_GROUP}
    meta l4proto tcp reject with tcp reset
  }}
  {TableShare.of(1 << 18, 16).chain}
  chain inward {{
    type filter hook input priority filter; policy drop;
    ct mark {TO_BROKER} tcp dport {BROKER_PORT} accept
    ct mark {TO_RESOLVER} meta l4proto {{ tcp, udp }} th dport {DNS_PORT} accept
  }}
  chain through {{
    type filter hook forward priority filter; policy drop;
  }}
  chain outward {{
    type filter hook output priority filter; policy drop;
    ct mark {{ {TO_BROKER}, {TO_RESOLVER} }} accept
    tcp flags rst accept
  }}
}}
"""


@dataclass(frozen=True, slots=True)
class Entry:
    """One opened destination of one interface; port None is every port, seconds None is until revoked."""

    address: str
    port: int | None
    seconds: int | None = None

    def element(self, ifname: str, *, timed: bool) -> tuple[str, str]:
        """The set it belongs to and the element text."""
        life = f" timeout {self.seconds}s" if timed and self.seconds is not None else ""
        if self.port is None:
            return "granted_any", f'"{ifname}" . {self.address}{life}'
        return "granted", f'"{ifname}" . {self.address} . {self.port}{life}'


def read_entries(rows: Iterable[Any]) -> list[Entry]:
    """Entries as the broker sends them, checked: they become text of a rule."""
    checked = []
    for address, port, seconds in rows:
        if port is not None and not 1 <= int(port) <= 65535:
            raise ValueError("port")
        life = None if seconds is None else min(max(int(seconds), 1), 86400)
        checked.append(Entry(str(ipaddress.IPv4Address(address)), None if port is None else int(port), life))
    return checked


def _load() -> ctypes.CDLL:
    try:
        lib = ctypes.CDLL("libnftables.so.1")
    except OSError:
        raise Unsupported(
            "network policy needs libnftables, which is not installed", hint="apt-get install libnftables1"
        ) from None
    lib.nft_ctx_new.restype = ctypes.c_void_p
    lib.nft_ctx_get_error_buffer.restype = ctypes.c_char_p
    return lib


class Nft:
    """A libnftables context of the namespace the calling thread is in; not for use by two threads at once."""

    def __init__(self) -> None:
        self._lib = _load()
        self._context = ctypes.c_void_p(self._lib.nft_ctx_new(0))
        self._lib.nft_ctx_buffer_error(self._context)
        self._lib.nft_ctx_buffer_output(self._context)

    def close(self) -> None:
        if self._context:
            self._lib.nft_ctx_free(self._context)
            self._context = ctypes.c_void_p(None)

    def run(self, commands: str) -> None:
        """Run commands as one transaction, or Internal with what the kernel said."""
        if self._lib.nft_run_cmd_from_buffer(self._context, commands.encode()) != 0:
            text = (self._lib.nft_ctx_get_error_buffer(self._context) or b"").decode(errors="replace")
            raise Internal(f"nftables refused a change: {text.strip()[:400]}")

    def load(self) -> None:
        self.run(RULESET)

    def admit(self, ifname: str, address: str) -> None:
        self.run(f'add element inet atoll members {{ "{ifname}" . {address} }}')

    def expel(self, ifname: str, address: str) -> None:
        self._quietly(f'delete element inet atoll members {{ "{ifname}" . {address} }}')

    def grant(self, ifname: str, entries: Iterable[Entry]) -> None:
        """Open destinations; an element that exists gets the new lifetime (add, delete, add is one transaction)."""
        self._change(ifname, entries, "add", "delete", "add")

    def revoke(self, ifname: str, entries: Iterable[Entry]) -> None:
        """Close destinations, also those that have run out already (what is added first can always be deleted)."""
        self._change(ifname, entries, "add", "delete")

    def _change(self, ifname: str, entries: Iterable[Entry], *steps: str) -> None:
        """One transaction for all entries, with one command for each set and step."""
        sets: dict[str, dict[str, str]] = {}
        for entry in entries:
            name, bare = entry.element(ifname, timed=False)
            sets.setdefault(name, {})[bare] = entry.element(ifname, timed=True)[1]
        commands = []
        for name, elements in sets.items():
            for step in steps:
                texts = elements if step == "delete" else elements.values()
                commands.append(f"{step} element inet atoll {name} {{ {', '.join(texts)} }}")
        if commands:
            self.run("\n".join(commands))

    def limit(self, share: TableShare) -> None:
        """Put another share of the connection table in force; open connections stay."""
        self.run(f"""flush chain inet atoll admit
            flush set inet atoll dns_rate
            flush set inet atoll syn_rate
            flush set inet atoll open
            table inet atoll {{
            {share.chain}
            }}
            """)

    def flush_grants(self) -> None:
        self.run("flush set inet atoll granted\nflush set inet atoll granted_any")

    def _quietly(self, command: str) -> None:
        """A deletion of what may have run out already."""
        try:
            self.run(command)
        except Internal as err:
            if "No such file" not in str(err):
                raise
