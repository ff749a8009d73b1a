"""`make bench`: every row in one go, beside bare-host figures of the same run."""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from atoll.client.blocking import Link
from atoll.client.calls import Call
from bench import doors, network, report
from bench.rows import Bench


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--runtimes", default="", help="comma list; default: those that work here")
    parser.add_argument("--rows", default="", help="comma list of words that a row's name must contain one of")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    args = parser.parse_args()

    home = tempfile.mkdtemp(prefix="atb-")
    env = {**os.environ, "ATOLL_HOME": home}
    atoll = [sys.executable, "-m", "atoll"]
    subprocess.run([*atoll, "daemon", "start"], env=env, check=True, stdout=subprocess.DEVNULL)
    bench = Bench(home, args.rounds, args.runtimes.split(",") if args.runtimes else working(home))
    wanted = [word for word in args.rows.split(",") if word]
    try:
        rows = [row.run(say) for row in bench.rows() if not wanted or any(word in row.name for word in wanted)]
        if not wanted:
            rows += network.rows(home, bench.runtimes[0], args.rounds) + doors.rows(
                home, bench.runtimes[0], args.rounds
            )
            bench.memory()
    finally:
        bench.close()
        subprocess.run([*atoll, "daemon", "stop", "--force"], env=env, check=False, stdout=subprocess.DEVNULL)
        shutil.rmtree(home, ignore_errors=True)
    print(report.table(rows, bench.facts))
    report.save(rows, bench.facts, args.out)
    print(f"\nwritten: {args.out}/results.json and results.svg")
    return 0


def say(text: str) -> None:
    if sys.stderr.isatty():
        sys.stderr.write(text)


def working(home: str) -> list[str]:
    """The runtimes whose probe passed."""
    found = Link(home).call(Call("GET", "/v1/runtimes"))["runtimes"]
    return sorted(r["name"] for r in found if r["works"] and r["name"] in ("container", "gvisor"))


if __name__ == "__main__":
    sys.exit(main())
