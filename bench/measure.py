"""Timing: contenders of one row take turns, round by round, so that the noise of a shared machine hits all alike."""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass
class Contender:
    """One way to do a row's work. `work` is timed; `before` and `after` of each round are not."""

    name: str
    work: Callable[[], object]
    before: Callable[[], object] = lambda: None
    after: Callable[[], object] = lambda: None
    seconds: list[float] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    @property
    def p50(self) -> float:
        return statistics.median(self.seconds) if self.seconds else float("nan")

    @property
    def p99(self) -> float:
        if not self.seconds:
            return float("nan")
        ordered = sorted(self.seconds)
        return ordered[min(len(ordered) - 1, round(0.99 * (len(ordered) - 1)))]


@dataclass
class Row:
    """One question. The first contender is the baseline; `goal` is the ratio of atoll's p50 to it that we aim at."""

    name: str
    contenders: list[Contender]
    rounds: int = 30
    goal: float | None = None
    unit_bytes: int = 0  # for throughput rows: bytes moved by one round

    def run(self, say: Callable[[str], None]) -> "Row":
        for c in self.contenders:  # one round nobody counts: caches, imports, first pages
            self._once(c, count=False)
        for number in range(self.rounds):
            say(f"\r{self.name}: round {number + 1}/{self.rounds} ")
            turn = number % len(self.contenders)
            for c in self.contenders[turn:] + self.contenders[:turn]:
                self._once(c, count=True)
        say("\r\033[K")
        return self

    def _once(self, c: Contender, *, count: bool) -> None:
        if len(c.failures) >= 3:
            return
        try:
            c.before()
            start = time.perf_counter()
            c.work()
            took = time.perf_counter() - start
            if count:
                c.seconds.append(took)
        except Exception as e:
            c.failures.append(f"{type(e).__name__}: {e}")
        finally:
            c.after()

    def ratio(self, c: Contender) -> float:
        return c.p50 / self.contenders[0].p50
