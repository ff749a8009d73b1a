"""What a benchmark run leaves behind: a table for the terminal, JSON for machines, an SVG chart for documents."""

import json
import math
import os
import platform
from pathlib import Path
from typing import Any

from bench.measure import Row


def amount(row: Row, seconds: float) -> str:
    if math.isnan(seconds):
        return "-"
    if row.unit_bytes:
        return f"{row.unit_bytes / seconds / 1e6:.0f} MB/s"
    return f"{seconds * 1000:.2f} ms"


def table(rows: list[Row], facts: list[tuple[str, str]]) -> str:
    lines = [f"{'':46} {'p50':>12} {'p99':>12} {'ratio':>7}  goal"]
    for row in rows:
        lines.append(row.name)
        for i, c in enumerate(row.contenders):
            if not c.seconds:
                lines.append(f"    {c.name:42} failed: {c.failures[0] if c.failures else 'not run'}")
                continue
            last = i == len(row.contenders) - 1 or c.name.startswith("atoll")
            goal = f"<= {row.goal:g}" if row.goal is not None and last and i else ""
            met = "" if not goal else (" met" if row.ratio(c) <= (row.goal or 0) else " MISSED")
            p50, p99 = amount(row, c.p50), amount(row, c.p99)
            lines.append(f"    {c.name:42} {p50:>12} {p99:>12} {row.ratio(c):>7.2f}  {goal}{met}")
    lines.extend(f"{name:50} {value}" for name, value in facts)
    return "\n".join(lines)


def machine() -> dict[str, Any]:
    return {
        "kernel": platform.release(),
        "cpus": os.cpu_count(),
        "memory_mb": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") >> 20,
        "python": platform.python_version(),
        "load": os.getloadavg()[0],
    }


def save(rows: list[Row], facts: list[tuple[str, str]], directory: Path) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    data = {
        "machine": machine(),
        "facts": dict(facts),
        "rows": [
            {
                "name": row.name,
                "goal": row.goal,
                "contenders": [
                    {
                        "name": c.name,
                        "p50_ms": None if not c.seconds else c.p50 * 1000,
                        "p99_ms": None if not c.seconds else c.p99 * 1000,
                        "ratio": None if not c.seconds else row.ratio(c),
                        "rounds": len(c.seconds),
                        "failures": c.failures,
                    }
                    for c in row.contenders
                ],
            }
            for row in rows
        ],
    }
    (directory / "results.json").write_text(json.dumps(data, indent=1))
    (directory / "results.svg").write_text(chart(rows))


def chart(rows: list[Row]) -> str:
    """Horizontal bars of p50 relative to the row's baseline, on a scale of powers of two."""
    bars: list[str] = []
    y = 24
    for row in rows:
        bars.append(f'<text x="8" y="{y}" font-weight="bold">{_text(row.name)}</text>')
        y += 18
        for c in row.contenders:
            if not c.seconds:
                continue
            width = 40 + 40 * math.log2(max(row.ratio(c), 0.03) / 0.03)
            colour = "#1b7f79" if c.name.startswith("atoll") else "#b8c4c2"
            label = f"{amount(row, c.p50)} ({row.ratio(c):.2f})"
            bars.append(f'<text x="16" y="{y + 11}">{_text(c.name)}</text>')
            bars.append(f'<rect x="300" y="{y}" width="{width:.0f}" height="14" fill="{colour}"/>')
            bars.append(f'<text x="{306 + width:.0f}" y="{y + 11}">{label}</text>')
            y += 18
        y += 10
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="900" height="{y}" font-family="sans-serif" font-size="12">'
    return "\n".join([head, '<rect width="100%" height="100%" fill="white"/>', *bars, "</svg>"])


def _text(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;")
