"""The statistics of a comparison, and a comparison of this revision with itself."""

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from bench.compare import figures
from bench.compare.revisions import ROOT


def noisy(ratio: float, count: int, seed: int) -> list[figures.Pair]:
    """Pairs on a machine whose speed wanders, with some noise of each sample's own."""
    chance = random.Random(seed)
    found = []
    for _ in range(count):
        machine = chance.uniform(1.0, 3.0)
        found.append((machine * chance.uniform(0.97, 1.03), ratio * machine * chance.uniform(0.97, 1.03)))
    return found


def test_the_ratio_is_that_of_the_medians() -> None:
    one = figures.compare([(1.0, 3.0), (2.0, 2.0), (9.0, 1.0)])
    assert (one.old, one.new, one.ratio, one.pairs) == (2.0, 2.0, 1.0, 3)
    assert one.low <= one.ratio <= one.high


def test_equal_samples_leave_no_doubt() -> None:
    one = figures.compare([(2.0, 2.2)] * 20)
    assert one.low == one.ratio == one.high == pytest.approx(1.1)


def test_the_bounds_hold_the_true_ratio_nineteen_times_of_twenty() -> None:
    hits = sum(
        one.low <= 1.2 <= one.high
        for one in (figures.compare(noisy(1.2, 20, seed), resamples=400) for seed in range(100))
    )
    assert hits >= 88


def test_more_pairs_narrow_the_bounds() -> None:
    few, many = (figures.compare(noisy(1.0, count, 7)) for count in (20, 500))
    assert many.high - many.low < few.high - few.low


def test_no_pair_is_an_error_and_sides_take_turns() -> None:
    with pytest.raises(ValueError, match="no pair"):
        figures.compare([])
    assert [figures.order(turn) for turn in range(3)] == [(0, 1), (1, 0), (0, 1)]


@pytest.mark.skipif(not os.environ.get("ATOLL_TEST_LONG"), reason="only in the long run: it builds a revision")
def test_a_revision_is_compared_with_itself_and_nothing_is_left(tmp_path: Path) -> None:
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    if head.returncode != 0:
        pytest.skip("this is no git checkout")
    before = subprocess.run(["git", "worktree", "list"], cwd=ROOT, capture_output=True, text=True).stdout
    argv = [sys.executable, "-m", "bench.compare", "HEAD", "HEAD", "--rows", "exec-true", "--pairs", "2", "--max", "99"]
    env = {key: value for key, value in os.environ.items() if not key.startswith("ATOLL_")}
    env["TMPDIR"] = str(tmp_path)
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr
    assert "exec-true" in done.stdout and "exec, system calls of the daemon" in done.stdout
    assert not list(tmp_path.iterdir())
    after = subprocess.run(["git", "worktree", "list"], cwd=ROOT, capture_output=True, text=True).stdout
    assert after == before
