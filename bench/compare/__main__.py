"""`make bench-compare OLD=rev NEW=rev`: whether the new revision is slower than the old one.

Both are checked out and set up below a temporary directory, each with a daemon of its own. For each row they take turns: old and
new, new and old, and so on. The result is new/old of the medians with its 95 % bounds; it ends with 1 when an upper bound is
over the maximum.
"""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from bench.compare import figures, revisions, worker
from bench.compare.revisions import ROOT, Revision

MOST = 1.10
PAIRS = 20


class Failed(Exception):
    """A side could not do what was asked of it."""


class Worker:
    """The process that measures one revision."""

    def __init__(self, revision: Revision, home: Path, runtime: str) -> None:
        self.name = revision.name
        script = Path(worker.__file__)
        env = {key: value for key, value in os.environ.items() if not key.startswith(("ATOLL_", "PYTHON", "K8E_"))}
        self._process = subprocess.Popen(
            [revision.python, str(script), str(revision.tree), str(home), runtime, str(ROOT / "tests" / "lab")],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=env, text=True, cwd="/",
        )  # fmt: skip
        try:
            self._answer()
        except Failed:
            self.close()
            log = home / "serve.log"
            raise Failed(f"{self.name}: {log.read_text()[-500:] if log.exists() else 'it did not start'}") from None

    def ask(self, do: str, row: str = "") -> dict[str, Any]:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({"do": do, "row": row}) + "\n")
            self._process.stdin.flush()
        except OSError:
            raise Failed(f"{self.name}: the worker has ended") from None
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise Failed(f"{self.name}: the worker has ended")
        answer: dict[str, Any] = json.loads(line)
        if "failed" in answer:
            raise Failed(f"{self.name}: {answer['failed']}")
        return answer

    def close(self) -> None:
        """End it; it stops its daemon and every sandbox first."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(420)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.compare", description=__doc__)
    parser.add_argument("old")
    parser.add_argument("new")
    parser.add_argument("--rows", default="", help=f"commas between them (default: all): {', '.join(worker.ROWS)}")
    parser.add_argument("--pairs", type=int, default=PAIRS, help=f"of each row (default {PAIRS})")
    parser.add_argument("--max", type=float, default=MOST, help=f"the highest upper bound (default {MOST:.2f})")
    parser.add_argument("--runtime", default="container", help="of the sandboxes (default container)")
    args = parser.parse_args()
    rows = [row for row in args.rows.replace(",", " ").split() if row] or list(worker.ROWS)
    if unknown := set(rows) - set(worker.ROWS):
        parser.error(f"no such row: {', '.join(sorted(unknown))}")
    if args.pairs < 1:
        parser.error("at least one pair")
    work = Path(tempfile.mkdtemp(prefix="atoll-compare-"))
    sides: list[Worker] = []
    found: list[Revision] = []
    try:
        for name, revision in (("old", args.old), ("new", args.new)):
            found.append(Revision(name, revision, work))
            say(f"{name}: setting up {found[-1].commit[:12]}")
            found[-1].make()
        for one in found:
            sides.append(Worker(one, work / f"home-{one.name}", args.runtime))
        return 0 if measure(sides, rows, args.pairs, args.max) else 1
    except (Failed, RuntimeError) as error:
        say(str(error))
        return 2
    except KeyboardInterrupt:
        say("interrupted; what was begun is cleaned away")
        return 130
    finally:
        for side in sides:
            side.close()
        for one in found:
            one.remove()
        shutil.rmtree(work, ignore_errors=True)
        revisions.prune()


def measure(sides: list[Worker], rows: list[str], pairs: int, most: float) -> bool:
    """Print the table; whether every row was measured and is within the bound."""
    print(f"{'row':20} {'old':>10} {'new':>10} {'new/old':>8} {'95 %':>13} {'pairs':>6}")
    well = True
    for row in rows:
        try:
            one = figures.compare(take_turns(sides, row, pairs))
        except Failed as error:
            well = False
            print(f"{row:20} not compared: {error}", flush=True)
            continue
        over = one.high > most
        well = well and not over
        print(
            f"{row:20} {one.old * 1000:7.2f} ms {one.new * 1000:7.2f} ms {one.ratio:8.3f} {one.low:6.3f}-{one.high:.3f}"
            f" {one.pairs:6}{f'  over {most:.2f}' if over else ''}",
            flush=True,
        )
    try:
        old, new = (side.ask("count")["counts"] for side in sides)
    except Failed as error:
        print(f"\nnot counted: {error}")
        return False
    print(f"\n{'counts of one call':36} {'old':>8} {'new':>8}")
    for name in old:
        print(f"{name:36} {old[name]:8.1f} {new[name]:8.1f}")
    return well


def take_turns(sides: list[Worker], row: str, pairs: int) -> list[figures.Pair]:
    """The samples of a row, pair by pair, after one of each side that nobody counts."""
    start = time.monotonic()
    begun: list[Worker] = []
    try:
        for side in sides:
            side.ask("begin", row)
            begun.append(side)
            side.ask("sample")
        found: list[figures.Pair] = []
        for turn in range(pairs):
            seconds = [0.0, 0.0]
            for number in figures.order(turn):
                seconds[number] = float(sides[number].ask("sample")["seconds"])
            found.append((seconds[0], seconds[1]))
        return found
    finally:
        for side in begun:
            side.ask("end")
        say(f"{row}: {time.monotonic() - start:.0f} s")


def say(text: str) -> None:
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    sys.exit(main())
