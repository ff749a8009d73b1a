"""Token buckets: how often a principal may call, by class of call.

The bucket belongs to the authenticated identity and to nothing a client can choose. Local callers have none. Buckets
keep their level when settings change, and one that has been idle for ten minutes is full again, so it is dropped.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from atoll.errors import RateLimited

Class = Literal["write", "read"]
IDLE_SECONDS = 600.0
_SWEEP_SECONDS = 60.0


@dataclass(frozen=True)
class Rate:
    """`burst` calls at once, `per_second` on average."""

    burst: float
    per_second: float


DEFAULTS: dict[Class, Rate] = {"write": Rate(10, 5), "read": Rate(30, 20)}


@dataclass
class _Bucket:
    level: float
    at: float


class Limiter:
    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._buckets: dict[tuple[str, Class], _Bucket] = {}
        self._swept = clock()

    def take(self, identity: str, kind: Class, rate: Rate | None = None) -> None:
        """Count one call or raise RateLimited with the seconds to wait."""
        rate = rate or DEFAULTS[kind]
        now = self._clock()
        self._sweep(now)
        bucket = self._buckets.get((identity, kind))
        if bucket is None:
            bucket = self._buckets[identity, kind] = _Bucket(rate.burst, now)
        bucket.level = min(rate.burst, bucket.level + max(0.0, now - bucket.at) * rate.per_second)
        bucket.at = now
        if bucket.level >= 1:
            bucket.level -= 1
            return
        wait = (1 - bucket.level) / rate.per_second if rate.per_second > 0 and rate.burst >= 1 else None
        text = f"; try again in {wait:.2f} s" if wait is not None else ""
        raise RateLimited(f"too many {kind} calls{text}", details={"retry_after_s": wait, "class": kind})

    def __len__(self) -> int:
        return len(self._buckets)

    def _sweep(self, now: float) -> None:
        if now - self._swept < _SWEEP_SECONDS:
            return
        self._swept = now
        for name in [name for name, bucket in self._buckets.items() if now - bucket.at >= IDLE_SECONDS]:
            del self._buckets[name]
