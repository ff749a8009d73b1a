"""An SVG chart of the rows: bars of p50 on a logarithmic scale, one panel a row, atoll in colour, goals as marks."""

import math
from html import escape

from bench.report import amount, ratio, summary
from bench.results import Figure, Results, Row

WIDTH, LEFT, RIGHT = 1000, 200, 310
BAR, GAP = 15, 4
SPAN = WIDTH - LEFT - RIGHT
STYLE = (
    "text{font-family:Helvetica,Arial,sans-serif;font-size:12px;fill:#1f2a30}"
    ".t{font-weight:bold;font-size:13px}.s{fill:#66737a;font-size:11px}.h{font-weight:bold;font-size:18px}"
)
OURS, OTHERS, MET, MISSED = "#12756f", "#b9c4c8", "#12756f", "#b3382c"


def chart(results: Results) -> str:
    """Rows without a peer are left to the table."""
    parts: list[str] = []
    y = 34
    parts.append(f'<text class="h" x="16" y="{y}">atoll beside what a user would pick instead</text>')
    y += 20
    facts = f"{results.at} · {results.machine.get('system', '')} · {results.machine.get('cores', '?')} cores"
    parts.append(
        f'<text class="s" x="16" y="{y}">{escape(facts)} · medians, logarithmic scale · {escape(short(results))}</text>'
    )
    y += 26
    for row in results.rows:
        if not any(f.p50 for f in row.figures if not ours(f)) or not any(f.p50 for f in row.figures if ours(f)):
            continue
        drawn, y = _panel(row, y)
        parts += drawn
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{y}" viewBox="0 0 {WIDTH} {y}">'
    return "\n".join(
        [head, f"<style>{STYLE}</style>", '<rect width="100%" height="100%" fill="white"/>', *parts, "</svg>\n"]
    )


def ours(figure: Figure) -> bool:
    return figure.name.startswith("atoll")


def short(results: Results) -> str:
    return summary(results).partition(";")[0]


def _panel(row: Row, y: int) -> tuple[list[str], int]:
    shown = [(f, f.p50) for f in row.figures if f.p50 is not None and f.p50 > 0]
    better = "higher is better" if row.unit in ("MB/s", "per s") else "lower is better"
    parts = [
        f'<text class="t" x="16" y="{y}">{escape(row.title.replace("`", ""))}<tspan class="s" dx="8">{row.unit}, {better}</tspan></text>'
    ]
    y += 8
    low, high = min(value for _, value in shown), max(value for _, value in shown)
    decades = max(1.0, math.log10(high / low) + 0.3)
    for figure, value in shown:
        width = SPAN * (1 - (math.log10(high) - math.log10(value)) / decades)
        parts += _bar(figure, value, row.unit, width, y)
        y += BAR + GAP
    for figure in row.figures:
        if figure.p50 is None:
            parts.append(f'<text class="s" x="{LEFT - 8}" y="{y + 11}" text-anchor="end">{escape(figure.name)}</text>')
            parts.append(f'<text class="s" x="{LEFT}" y="{y + 11}">{escape(figure.excuse[:90])}</text>')
            y += BAR + GAP
    return parts, y + 22


def _bar(figure: Figure, value: float, unit: str, width: float, y: int) -> list[str]:
    label = amount(value, unit) + (f"  ({ratio(figure)})" if figure.ratio is not None else "")
    mark = ""
    if figure.met is not None:
        colour, word = (MET, "met") if figure.met else (MISSED, "MISSED")
        mark = f'<tspan dx="6" fill="{colour}">{escape(figure.goal)}: {word}</tspan>'
    weight = ' font-weight="bold"' if ours(figure) else ""
    return [
        f'<text x="{LEFT - 8}" y="{y + 12}" text-anchor="end"{weight}>{escape(figure.name)}</text>',
        f'<rect x="{LEFT}" y="{y}" width="{width:.1f}" height="{BAR}" rx="2" fill="{OURS if ours(figure) else OTHERS}"/>',
        f'<text x="{LEFT + width + 6:.1f}" y="{y + 12}">{escape(label)}{mark}</text>',
    ]
