"""One account of what each holder holds: memory, threads, disk, rule elements, connections, kept output, audit bytes.

A holder is a sandbox, an owner, or a stranger (an address nobody has identified). A charge names one or more of them and
counts for each, and for the total. It is refused as a whole, with `Exhausted`, when one of them would pass its cap. What is
charged is given back by `release`, by the end of its lease, or by the end of any of its holders, whichever comes first.

The daemon and the broker each have one `Accounts`. This module imports nothing heavy, because both do.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from threading import Lock
from typing import Final, NamedTuple

from atoll.errors import Exhausted

MEMORY: Final = "memory"  # bytes the process holds for somebody
THREADS: Final = "threads"
DISK: Final = "disk"  # bytes
ELEMENTS: Final = "elements"  # of the router's rule sets
CONNECTIONS: Final = "connections"
OUTPUT: Final = "output"  # bytes of commands' output kept on the host
AUDIT: Final = "audit"  # bytes of the audit log
KINDS: Final = (MEMORY, THREADS, DISK, ELEMENTS, CONNECTIONS, OUTPUT, AUDIT)

KEPT_FOR_OTHERS: Final = 8  # the last eighth of a total is for holders that hold nothing of the kind
_BYTES: Final = frozenset((MEMORY, DISK, OUTPUT, AUDIT))

Caps = Mapping[str, Mapping[str, int]]  # "sandbox", "owner", "stranger" or "total" -> kind -> cap; 0 or none: no cap


class Holder(NamedTuple):
    """`role` is `sandbox`, `owner`, `stranger` or `total`."""

    role: str
    name: str

    def __str__(self) -> str:
        return f"{self.role} {self.name}" if self.name else self.role


TOTAL: Final = Holder("total", "")


def sandbox(name: str) -> Holder:
    return Holder("sandbox", name)


def owner(name: str) -> Holder:
    return Holder("owner", name)


def stranger(address: str) -> Holder:
    """The holder for a network address. An IPv6 /64 is one stranger: whoever has one has all of it."""
    try:
        found = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return Holder("stranger", address)
    if isinstance(found, ipaddress.IPv6Address):
        if found.ipv4_mapped is not None:
            return Holder("stranger", str(found.ipv4_mapped))
        return Holder("stranger", str(ipaddress.ip_network((found, 64), strict=False)))
    return Holder("stranger", str(found))


class _Record:
    """The amounts of one charge. `over`: one of its holders has ended, and everything was given back."""

    __slots__ = ("amounts", "holders", "over")

    def __init__(self, holders: tuple[Holder, ...]) -> None:
        if not holders:
            raise ValueError("a charge needs a holder")
        self.holders = holders
        self.amounts: dict[str, int] = {}
        self.over = False


class Lease:
    """A charge that is given back when the lease ends. It can grow and shrink meanwhile."""

    __slots__ = ("_accounts", "_record", "amount", "kind")

    def __init__(self, accounts: Accounts, kind: str, record: _Record) -> None:
        self._accounts = accounts
        self._record = record
        self.kind = kind
        self.amount = 0

    @property
    def holders(self) -> tuple[Holder, ...]:
        return self._record.holders

    def grow(self, amount: int) -> None:
        """Charge `amount` more; raises Exhausted and changes nothing when a cap is reached."""
        with self._accounts._lock:
            self._accounts._add(self.kind, amount, self._record)
            self.amount += amount

    def shrink(self, amount: int) -> None:
        """Give `amount` back, at most what is left."""
        with self._accounts._lock:
            amount = min(amount, self.amount)
            self.amount -= amount
            self._accounts._take(self.kind, amount, self._record)

    def end(self) -> None:
        """Give everything back. Again is no error."""
        self.shrink(self.amount)

    def __enter__(self) -> Lease:
        return self

    def __exit__(self, *exc: object) -> None:
        self.end()


class Accounts:
    """All accounts of one process. Safe to use from any thread."""

    def __init__(self, caps: Caps | None = None) -> None:
        self._caps = {
            (role, kind): cap for role, kinds in (caps or {}).items() for kind, cap in kinds.items() if cap > 0
        }
        self._held: dict[Holder, dict[str, int]] = {}
        self._charged: dict[tuple[Holder, ...], _Record] = {}  # by `charge`, which has no lease to remember it
        self._records: dict[Holder, set[_Record]] = {}  # those that are not empty
        self._lock = Lock()

    def charge(self, kind: str, amount: int, *holders: Holder) -> None:
        """Add `amount` to each holder and to the total; Exhausted, and nothing added, when one would pass its cap."""
        with self._lock:
            record = self._charged.get(holders) or _Record(holders)
            self._add(kind, amount, record)
            if record.amounts:
                self._charged[holders] = record

    def release(self, kind: str, amount: int, *holders: Holder) -> None:
        """Give back what `charge` took for exactly these holders, at most what they hold together."""
        with self._lock:
            if (record := self._charged.get(holders)) is not None:
                self._take(kind, min(amount, record.amounts.get(kind, 0)), record)
                if not record.amounts:
                    del self._charged[holders]

    def lease(self, kind: str, amount: int, *holders: Holder) -> Lease:
        """Charge, and give back with the lease's `end` or at the end of its `with` block."""
        made = Lease(self, kind, _Record(holders))
        made.grow(amount)
        return made

    def end(self, holder: Holder) -> None:
        """The holder is gone: everything charged to it is given back, also by those charged together with it."""
        with self._lock:
            for record in list(self._records.get(holder, ())):
                for kind, amount in list(record.amounts.items()):
                    self._take(kind, amount, record)
                record.over = True
                if self._charged.get(record.holders) is record:
                    del self._charged[record.holders]

    def held(self, kind: str, holder: Holder = TOTAL) -> int:
        """How much this holder holds of this kind."""
        return self._held.get(holder, {}).get(kind, 0)

    def cap(self, kind: str, holder: Holder = TOTAL) -> int | None:
        """The most this holder may hold of this kind; None: there is no cap."""
        return self._caps.get((holder.role, kind))

    def snapshot(self) -> dict[str, dict[str, int]]:
        """Every account that is not zero: holder -> kind -> amount."""
        with self._lock:
            return {str(holder): dict(kinds) for holder, kinds in self._held.items()}

    # Behind the verbs

    def _add(self, kind: str, amount: int, record: _Record) -> None:
        if amount < 0:
            raise ValueError("a charge is not negative")
        if record.over or not amount:
            return
        for holder in record.holders:
            self._check(kind, amount, holder, self.cap(kind, holder))
        self._check_total(kind, amount, record)
        if not record.amounts:
            for holder in record.holders:
                self._records.setdefault(holder, set()).add(record)
        record.amounts[kind] = record.amounts.get(kind, 0) + amount
        self._change(kind, amount, record)

    def _take(self, kind: str, amount: int, record: _Record) -> None:
        if record.over or amount <= 0:
            return
        self._change(kind, -amount, record)
        record.amounts[kind] -= amount
        if not record.amounts[kind]:
            del record.amounts[kind]
        if not record.amounts:
            for holder in record.holders:
                self._records[holder].discard(record)
                if not self._records[holder]:
                    del self._records[holder]

    def _check(self, kind: str, amount: int, holder: Holder, cap: int | None) -> None:
        held = self.held(kind, holder)
        if cap is None or held + amount <= cap:
            return
        whose = "all callers together" if holder is TOTAL else f"this {holder.role}"
        raise Exhausted(
            f"{whose} may hold {_shown(kind, cap)}: {_shown(kind, held)} are held, {_shown(kind, amount)} were asked for",
            hint=f"wait, end something, or set `{setting(kind)}` in [accounts.{holder.role}] of config.toml",
            details={"account": holder.role, "kind": kind, "cap": cap, "held": held},
        )

    def _check_total(self, kind: str, amount: int, record: _Record) -> None:
        cap = self.cap(kind)
        if cap is None:
            return
        others = any(self.held(kind, holder) for holder in record.holders)
        self._check(kind, amount, TOTAL, cap - cap // KEPT_FOR_OTHERS if others else cap)

    def _change(self, kind: str, amount: int, record: _Record) -> None:
        for holder in (*record.holders, TOTAL):
            kinds = self._held.setdefault(holder, {})
            left = kinds.get(kind, 0) + amount
            if left:
                kinds[kind] = left
                continue
            kinds.pop(kind, None)
            if not kinds:
                del self._held[holder]


def setting(kind: str) -> str:
    """Return the name of a kind in config.toml: bytes are set in MB."""
    return f"{kind}_mb" if kind in _BYTES else kind


def _shown(kind: str, amount: int) -> str:
    if kind not in _BYTES:
        return f"{amount} {kind}"
    if amount >= 1 << 20:
        return f"{amount >> 20} MB of {kind}"
    return f"{amount} bytes of {kind}"
