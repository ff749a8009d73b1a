"""Results for people: a table for the terminal, and the same as Markdown for docs/performance.md."""

from pathlib import Path

from bench.results import Figure, Results, Row

BEGIN = "<!-- results: written by `python -m bench --document` -->"
END = "<!-- end of results -->"


def amount(value: float | None, unit: str) -> str:
    if value is None:
        return "-"
    digits = 0 if abs(value) >= 1000 or value == int(value) else 2 if abs(value) < 100 else 1
    return f"{value:,.{digits}f} {'' if unit == 'errors' else unit}".strip()


def verdict(figure: Figure) -> str:
    if not figure.goal:
        return ""
    return f"{figure.goal}: {'open' if figure.met is None else 'met' if figure.met else 'MISSED'}"


def ratio(figure: Figure) -> str:
    return "" if figure.ratio is None else f"{figure.ratio:.2f}"


def table(results: Results) -> str:
    lines = [f"{'':40} {'p50':>13} {'p99':>13} {'ratio':>7}  goal"]
    for row in results.rows:
        lines.append(row.title)
        for figure in row.figures:
            if figure.p50 is None:
                lines.append(f"    {figure.name:36} {figure.excuse}")
                continue
            p50, p99 = amount(figure.p50, row.unit), amount(figure.p99, row.unit) if figure.rounds > 1 else ""
            failed = f"  {len(figure.failures)} failed: {figure.failures[0]}" if figure.failures else ""
            lines.append(
                f"    {figure.name:36} {p50:>13} {p99:>13} {ratio(figure):>7}  {verdict(figure)}{failed}".rstrip()
            )
    rough = ["A quick run: rough figures, and crowds of a twentieth."] if results.quick else []
    return "\n".join([*lines, "", *rough, summary(results)])


def summary(results: Results) -> str:
    judged = [f for row in results.rows for f in row.figures if f.met is not None]
    missed = [f"{row.id} ({f.name})" for row in results.rows for f in row.figures if f.met is False]
    text = f"{sum(bool(f.met) for f in judged)} of {len(judged)} goals met"
    return text + (f"; missed: {', '.join(missed)}" if missed else "")


def markdown(results: Results) -> str:
    """All rows in one table, where a row's question is a line of its own."""
    facts = "; ".join(f"{name} {value}" for name, value in results.machine.items())
    minutes = results.seconds / 60
    lines = [f"Run of {results.at}, {minutes:.0f} minutes. {facts}.", "", f"{summary(results)}.", ""]
    if results.quick:
        lines.insert(1, "A quick run: the figures are rough.")
    lines += ["| | p50 | p99 | ratio | goal |", "|---|---|---|---|---|"]
    for row in results.rows:
        lines.append(f"| **{row.title}** | | | | |")
        lines += [_line(row, figure) for figure in row.figures]
    return "\n".join(lines)


def _line(row: Row, figure: Figure) -> str:
    if figure.p50 is None:
        return f"| {figure.name} | {figure.excuse.replace('|', '/')} | | | {verdict(figure)} |"
    p99 = amount(figure.p99, row.unit) if figure.rounds > 1 else ""
    return f"| {figure.name} | {amount(figure.p50, row.unit)} | {p99} | {ratio(figure)} | {verdict(figure)} |"


def document(results: Results, page: Path) -> None:
    """Put the table between the page's two marks."""
    text = page.read_text()
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{page} has no place for results")
    page.write_text(f"{before}{BEGIN}\n\n{markdown(results)}\n\n{END}{after}")
