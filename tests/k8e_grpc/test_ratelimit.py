"""Token buckets, with a clock of their own."""

import pytest

from atoll.core.access.ratelimit import DEFAULTS, Limiter, Rate
from atoll.errors import RateLimited


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def drain(limiter: Limiter, who: str, kind, rate: Rate | None = None) -> int:
    for taken in range(1000):
        try:
            limiter.take(who, kind, rate)
        except RateLimited:
            return taken
    raise AssertionError("no limit")


def test_k8e_numbers() -> None:
    clock = Clock()
    limiter = Limiter(clock)
    assert drain(limiter, "a", "write") == 10
    assert drain(limiter, "a", "read") == 30
    clock.now += 1
    assert drain(limiter, "a", "write") == 5
    assert drain(limiter, "a", "read") == 20
    clock.now += 3600
    assert drain(limiter, "a", "write") == 10


def test_identities_do_not_share_a_bucket() -> None:
    limiter = Limiter(Clock())
    assert drain(limiter, "a", "write") == 10
    assert drain(limiter, "b", "write") == 10


def test_a_changed_rate_does_not_refill() -> None:
    """Settings may be reloaded at any time; that must not hand out a new burst."""
    clock = Clock()
    limiter = Limiter(clock)
    assert drain(limiter, "a", "write") == 10
    assert drain(limiter, "a", "write", Rate(100, 5)) == 0
    clock.now += 1
    assert drain(limiter, "a", "write", Rate(3, 5)) == 3


def test_refusal_says_how_long() -> None:
    limiter = Limiter(Clock())
    drain(limiter, "a", "write")
    with pytest.raises(RateLimited) as caught:
        limiter.take("a", "write")
    assert caught.value.details["retry_after_s"] == pytest.approx(0.2)
    assert caught.value.retry == "yes"


def test_zero_rate_is_never() -> None:
    assert drain(Limiter(Clock()), "a", "write", Rate(0, 0)) == 0


def test_idle_buckets_go_and_memory_stays_bounded() -> None:
    clock = Clock()
    limiter = Limiter(clock)
    for number in range(5000):
        limiter.take(f"k{number}", "read")
    clock.now += 601
    limiter.take("fresh", "read")
    assert len(limiter) == 1
    assert DEFAULTS["read"] == Rate(30, 20)


def test_a_clock_that_steps_back_takes_nothing_away() -> None:
    clock = Clock()
    limiter = Limiter(clock)
    limiter.take("a", "write")
    clock.now -= 1000
    limiter.take("a", "write")
