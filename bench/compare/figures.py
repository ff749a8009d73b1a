"""The arithmetic of a comparison: the ratio of two medians, and how far chance may have moved it."""

import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

RESAMPLES = 4000
Pair = tuple[float, float]  # seconds of the old revision and of the new one, measured next to each other


@dataclass(frozen=True)
class Compared:
    """One row: medians in seconds, and new/old with the bounds of its 95 % interval."""

    old: float
    new: float
    ratio: float
    low: float
    high: float
    pairs: int


def compare(pairs: Sequence[Pair], *, seed: int = 1, resamples: int = RESAMPLES) -> Compared:
    """The ratio of medians and its percentile bootstrap over pairs.

    Whole pairs are drawn, because the noise of a shared machine hits both halves of a pair.
    """
    if not pairs:
        raise ValueError("there is no pair to compare")
    chance = random.Random(seed)
    drawn = sorted(_ratio(chance.choices(pairs, k=len(pairs))) for _ in range(resamples))
    edge = round(0.025 * (resamples - 1))
    old, new = (statistics.median(half) for half in zip(*pairs, strict=True))
    return Compared(old, new, _ratio(pairs), drawn[edge], drawn[-1 - edge], len(pairs))


def order(turn: int) -> tuple[int, int]:
    """Return which side goes first: 0 is the old one. A B, B A, A B, ..."""
    return (0, 1) if turn % 2 == 0 else (1, 0)


def _ratio(pairs: Sequence[Pair]) -> float:
    return statistics.median(new for _, new in pairs) / statistics.median(old for old, _ in pairs)
