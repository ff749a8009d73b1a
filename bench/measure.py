"""Timing: contenders of one row take turns, round by round, so that the noise of a shared machine hits all alike."""

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

MOST_FAILURES = 3
FEWEST_ROUNDS = 3
LONGEST_ROW = 14.0  # seconds; after that the round under way is the last, if there were a few
HIGHER_IS_BETTER = ("MB/s", "per s")


@dataclass(frozen=True)
class Goal:
    """The goal of a contender: at most (`ratio`) or at least (`times`) so many times the baseline, a figure of its own,
    or so much more than the baseline."""

    kind: Literal["ratio", "times", "most", "least", "extra"]
    value: float

    def met(self, figure: float, baseline: float) -> bool:
        if self.kind == "ratio":
            return figure <= self.value * baseline
        if self.kind == "times":
            return figure >= self.value * baseline
        if self.kind == "extra":
            return figure - baseline <= self.value
        return figure >= self.value if self.kind == "least" else figure <= self.value

    def text(self, unit: str) -> str:
        if self.kind == "ratio":
            return f"at most {self.value:g} x"
        if self.kind == "times":
            return f"at least {self.value:g} x"
        words = {"most": "at most", "least": "at least", "extra": "at most +"}[self.kind]
        return f"{words}{'' if self.kind == 'extra' else ' '}{self.value:g} {unit}".rstrip()


@dataclass
class Contender:
    """One way to do a row's work. `work` is timed unless it returns a figure, or a list of them, one for each call it made.
    `before` and `after` of each round are not timed.

    A returned figure is in seconds for rows in ms and MB/s, and in the row's own unit for all others.
    """

    name: str
    work: Callable[[], object] | None
    before: Callable[[], object] = lambda: None
    after: Callable[[], object] = lambda: None
    why: str = ""  # why it does not run here
    figures: list[float] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    @property
    def excuse(self) -> str:
        """Why there is no figure; empty when there is one."""
        if self.figures:
            return ""
        return f"not run: {self.why}" if self.work is None else f"failed: {(self.failures or ['no round'])[0]}"


def absent(name: str, why: str) -> Contender:
    return Contender(name, None, why=why)


def middle(figures: list[float]) -> float:
    return statistics.median(figures) if figures else math.nan


def worst_percent(figures: list[float], unit: str) -> float:
    """The 99th percentile, counted from the good end: of times the long ones, of rates the low ones."""
    if not figures:
        return math.nan
    ordered = sorted(figures, reverse=unit in HIGHER_IS_BETTER)
    return ordered[min(len(ordered) - 1, round(0.99 * (len(ordered) - 1)))]


def figure_of(unit: str, size: int, seconds: float, returned: object) -> float:
    """Return the figure of one round, from the time it took and the value it returned."""
    given = float(returned) if isinstance(returned, (int, float)) and not isinstance(returned, bool) else None
    if unit == "ms":
        return (seconds if given is None else given) * 1000
    if unit == "MB/s":
        return size / (seconds if given is None else given) / 1e6
    if given is None:
        raise ValueError(f"work of a row in {unit!r} has to return its figure")
    return given


def race(
    contenders: list[Contender], rounds: int, unit: str, size: int, *, warm_up: bool = True, say: Callable[[str], None]
) -> None:
    """Let them take turns. One round before that nobody counts: caches, imports, first pages."""
    runners = [c for c in contenders if c.work is not None]
    if warm_up:
        for c in runners:
            _once(c, unit, size, count=False)
    until = time.monotonic() + LONGEST_ROW
    for number in range(rounds):
        if number >= FEWEST_ROUNDS and time.monotonic() > until:
            return
        say(f"{number + 1}/{rounds}")
        turn = number % len(runners) if runners else 0
        for c in runners[turn:] + runners[:turn]:
            _once(c, unit, size, count=True)


def _once(c: Contender, unit: str, size: int, *, count: bool) -> None:
    if len(c.failures) >= MOST_FAILURES or c.work is None:
        return
    try:
        c.before()
        start = time.perf_counter()
        returned = c.work()
        seconds = time.perf_counter() - start
        if count:
            each = returned if isinstance(returned, list) else [returned]
            c.figures.extend(figure_of(unit, size, seconds, one) for one in each)
    except Exception as e:
        c.failures.append(f"{type(e).__name__}: {e}"[:300])
    finally:
        c.after()
