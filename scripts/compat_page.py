"""Parts that the pages of docs/compat share: a table of promises with the files that test each, and writing or checking a page."""

import sys
from collections.abc import Mapping
from pathlib import Path


def table(promises: Mapping[str, str], tests: Mapping[str, set[str]]) -> str:
    """One row a promise; a promise that no test holds us to says so."""
    rows = []
    for promise, text in promises.items():
        shown = ", ".join(f"[{Path(path).name}](../../{path})" for path in sorted(tests.get(promise, ()))) or "none yet"
        rows.append(f"| {promise} | {text} | {shown} |")
    return "\n".join(rows) + "\n"


def write(page: Path, fresh: str, script: str) -> int:
    """Write the page; with `--check` only say whether it is what it should be."""
    if "--check" not in sys.argv[1:]:
        page.write_text(fresh)
        return 0
    if page.exists() and page.read_text() == fresh:
        return 0
    print(f"docs/compat/{page.name} is stale: run {script}", file=sys.stderr)
    return 1
