"""`make bench`: every row in one go, beside bare-host figures of the same run, then a table, JSON and a chart.

python -m bench                        all rows (about a quarter of an hour on two cores)
python -m bench --rows create          a first look at some of them, in few rounds
python -m bench --document             docs/performance.md anew from the last results
"""

import argparse
import fnmatch
import os
import signal
import sys
import time
from pathlib import Path

from bench import chart, report, results
from bench.lab import Lab
from bench.measure import FEWEST_ROUNDS, absent, race
from bench.rows import PLANS, Plan

HERE = Path(__file__).parent
KEPT = HERE / "results"
PAGE = HERE.parent / "docs" / "performance.md"
QUICK = 3


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--only",
        default="",
        metavar="PATTERN",
        help="rows whose id has this word or matches this glob; commas for more",
    )
    parser.add_argument(
        "--rows", default="", metavar="PATTERN", help="short for --quick --only PATTERN: seconds for a row"
    )
    parser.add_argument("--rounds", type=int, default=20, help="rounds of an ordinary row (default 20)")
    parser.add_argument("--quick", action="store_true", help="few rounds and small crowds; the figures are rough")
    parser.add_argument("--list", action="store_true", help="say which rows there are")
    parser.add_argument(
        "--document", action="store_true", help="write the last results into docs/performance.md, without a run"
    )
    parser.add_argument("--skip", default="", metavar="PATTERN", help="not these")
    parser.add_argument("--out", type=Path, help="where results go (default: bench/results, for whole runs alone)")
    args = parser.parse_args()
    if args.rows:
        args.only, args.quick = args.rows, True
    plans = [p for p in PLANS if wanted(p.id, args.only) and not (args.skip and wanted(p.id, args.skip))]
    if args.list:
        print("\n".join(f"{plan.id:32} {plan.title}" for plan in plans))
        return 0
    if args.document:
        last = results.load((args.out or KEPT) / "results.json")
        report.document(last, PAGE)
        PAGE.with_suffix(".svg").write_text(chart.chart(last))
        print(f"written: {PAGE}")
        return 0
    if not plans:
        parser.error("no row matches")
    found = measure(plans, QUICK if args.quick else args.rounds, quick=args.quick)
    print(report.table(found))
    whole = len(found.rows) == len(PLANS) and not args.quick
    out = args.out or (KEPT if whole else None)
    if out is None:
        print("\nnot written: this was not a whole run; --out DIR keeps it")
        return 0
    results.save(found, out / "results.json")
    (out / "results.svg").write_text(chart.chart(found))
    print(f"\nwritten: {out}/results.json and results.svg")
    return 0


def wanted(ident: str, patterns: str) -> bool:
    words = [word for word in patterns.split(",") if word]
    return not words or any(word in ident or fnmatch.fnmatch(ident, word) for word in words)


def measure(plans: list[Plan], rounds: int, *, quick: bool = False) -> results.Results:
    """All rows, one after the other. An interrupt ends the run; what was begun is cleaned away."""
    load, start = os.getloadavg()[0], time.monotonic()
    rows: list[results.Row] = []
    lab = Lab(rounds, quick=quick)
    try:
        with lab:
            for number, plan in enumerate(plans, 1):
                say(f"[{number}/{len(plans)}] {time.monotonic() - start:4.0f} s  {plan.title}\n")
                rows.append(one(lab, plan))
    except KeyboardInterrupt:
        say("interrupted; what was begun is cleaned away\n")
        if not rows:
            raise SystemExit(130) from None
    return results.Results(
        at=results.now(), seconds=time.monotonic() - start, quick=quick, machine=results.machine(load), rows=rows
    )


def one(lab: Lab, plan: Plan) -> results.Row:
    """A row that cannot even begin is a line that says so."""
    if plan.runtime and plan.runtime not in lab.runtimes:
        contenders = [absent("atoll", f"the {plan.runtime} runtime does not work here")]
        return results.row_of(plan.id, plan.title, plan.unit, contenders, plan.goals)
    try:
        contenders = plan.make(lab)
        count = plan.turns or max(FEWEST_ROUNDS, round(lab.rounds * plan.rounds))
        race(contenders, count, plan.unit, plan.size, warm_up=not plan.turns, say=progress)
    except Exception as error:
        contenders = [absent("atoll", f"{type(error).__name__}: {error}"[:300])]
    finally:
        say("\r\033[K" if sys.stderr.isatty() else "")
        clean(lab)
    return results.row_of(plan.id, plan.title, plan.unit, contenders, plan.goals)


def clean(lab: Lab) -> None:
    try:
        lab.end_row()
    except Exception as error:
        say(f"    left over until the end of the run: {type(error).__name__}: {error}\n")


def progress(text: str) -> None:
    if sys.stderr.isatty():
        say(f"\r    round {text} ")


def say(text: str) -> None:
    sys.stderr.write(text)
    sys.stderr.flush()


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    sys.exit(main())
