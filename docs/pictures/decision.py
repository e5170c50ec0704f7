"""Draw `decision.svg` from what `legato simulate --share --json` printed: how much the workers compute in each case.

    python docs/pictures/decision.py ./*.json > decision.svg

The files are called WHAT-PLACEMENT.json; docs/tutorials/decision.md makes them. Of a file with several cases, the
first one is drawn, that of equal priorities.
"""

import json
import sys
from pathlib import Path

TITLES = {
    "today": "today",
    "bandwidth": "twice the bandwidth",
    "rail": "a rail more",
    "aggregation": "aggregation in switches",
}
COLORS = {"spread": "#b4561a", "packed": "#2b6cb0"}
LEFT, WIDTH, HEIGHT, GAP = 190, 420, 18, 20


def main():
    found = {}
    for path in map(Path, sys.argv[1:]):
        what, placement = path.stem.split("-")
        found[what, placement] = json.loads(path.read_text())["cases"][0]["utilization"]
    shapes, y = [], 26

    def text(x, y, content, anchor="start", weight="400"):
        shapes.append(
            f'<text x="{x:.0f}" y="{y}" fill="#7d8590" text-anchor="{anchor}" font-size="13" '
            f'font-weight="{weight}">{content}</text>'
        )

    text(LEFT, 14, "share of the time in which workers compute (simulated)")
    for what, title in TITLES.items():
        text(LEFT - 10, y + HEIGHT + 4, title, "end", "600")
        for placement, color in COLORS.items():
            share = found[what, placement]
            shapes.append(f'<rect x="{LEFT}" y="{y}" width="{WIDTH * share:.1f}" height="{HEIGHT}" fill="{color}"/>')
            text(LEFT + WIDTH * share + 6, y + 14, f"{share:.0%} {placement}")
            y += HEIGHT + 1
        y += GAP
    body = "".join(shapes)
    print(
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {LEFT + WIDTH + 100} {y}" width="{LEFT + WIDTH + 100}" '
        f'font-family="system-ui, sans-serif" role="img" aria-label="Utilization of the mix of jobs, by what is bought '
        f'and how jobs are placed">{body}</svg>'
    )


if __name__ == "__main__":
    main()
