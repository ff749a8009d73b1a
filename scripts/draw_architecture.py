"""Draw docs/architecture.svg from the layers in docs/architecture.layers.

scripts/draw_architecture.py            writes the picture
scripts/draw_architecture.py --check    fails when the one in the repository is not current
"""

import sys
from html import escape
from pathlib import Path

DOCS = Path(__file__).resolve().parents[1] / "docs"
SOURCE, PICTURE = DOCS / "architecture.layers", DOCS / "architecture.svg"
WIDTH, LEFT, ROW, HEIGHT, GAP = 960, 110, 92, 60, 12
STYLE = (
    "text{font:13px sans-serif;fill:#222}.name{font-weight:bold}.small{font-size:11px;fill:#555}"
    ".box{fill:#f4f7fb;stroke:#4a6fa5}.layer{fill:#4a6fa5;font-weight:bold}.arrow{stroke:#888;stroke-width:1.5}"
)


def read(text: str) -> list[tuple[str, list[list[str]]]]:
    """Return each layer's name and its boxes: a title and the line below it."""
    rows = []
    for line in text.splitlines():
        if line and not line.startswith("#"):
            name, _, rest = line.partition(":")
            rows.append((name, [[part.strip() for part in box.split("|")] for box in rest.split(",")]))
    return rows


def draw(rows: list[tuple[str, list[list[str]]]]) -> str:
    """Return the picture."""
    height = ROW * len(rows) + GAP
    size = f'width="{WIDTH}" height="{height}" viewBox="0 0 {WIDTH} {height}"'
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" {size}>', f"<style>{STYLE}</style>"]
    for number, (name, boxes) in enumerate(rows):
        top = GAP + number * ROW
        parts.append(f'<text class="layer" x="8" y="{top + 35}">{escape(name)}</text>')
        wide = (WIDTH - LEFT - GAP) / len(boxes)
        for place, box in enumerate(boxes):
            left = LEFT + place * wide
            middle = left + (wide - GAP) / 2
            parts.append(
                f'<rect class="box" x="{left:.1f}" y="{top}" width="{wide - GAP:.1f}" height="{HEIGHT}" rx="6"/>'
            )
            for row, text in enumerate(box):
                style, y = ("name", top + (34 if len(box) == 1 else 26)) if row == 0 else ("small", top + 46)
                text = escape(text.replace("; ", ", "))
                parts.append(f'<text class="{style}" x="{middle:.1f}" y="{y}" text-anchor="middle">{text}</text>')
        if number + 1 < len(rows):
            middle = LEFT + (WIDTH - LEFT) / 2
            start, end = top + HEIGHT + 4, top + ROW - 6
            parts.append(f'<line class="arrow" x1="{middle}" y1="{start}" x2="{middle}" y2="{end}"/>')
            parts.append(f'<path d="M{middle - 5} {end - 6} L{middle} {end} L{middle + 5} {end - 6}" fill="#888"/>')
    return "\n".join([*parts, "</svg>", ""])


def main() -> int:
    made = draw(read(SOURCE.read_text()))
    if "--check" in sys.argv:
        if PICTURE.read_text() != made:
            print("docs/architecture.svg is not current; run scripts/draw_architecture.py", file=sys.stderr)
            return 1
        return 0
    PICTURE.write_text(made)
    return 0


if __name__ == "__main__":
    sys.exit(main())
