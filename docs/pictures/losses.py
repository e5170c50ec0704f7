"""Draw `losses.svg` from what `python benchmarks/wire.py --losses FILE` wrote: loss by step, a line a run.

    python docs/pictures/losses.py losses.json > losses.svg

Each point is the mean of 20 steps.
"""

import json
import math
import statistics
import sys
from pathlib import Path

COLORS = {"exact": "#7d8590", "bf16": "#b4561a", "fp16": "#2b6cb0"}
LEFT, TOP, WIDTH, HEIGHT, WINDOW = 60, 24, 420, 170, 20
LEAST, MOST = 0.002, 5.0


def main():
    runs = json.loads(Path(sys.argv[1]).read_text())
    steps, shapes = len(runs[0]["losses"]), []

    def text(x, y, content, anchor="start", fill="#7d8590"):
        shapes.append(f'<text x="{x:.0f}" y="{y:.0f}" fill="{fill}" text-anchor="{anchor}">{content}</text>')

    def height(loss):
        share = math.log(min(max(loss, LEAST), MOST) / LEAST) / math.log(MOST / LEAST)
        return TOP + HEIGHT * (1 - share)

    text(LEFT, 14, "loss (logarithmic) by step; a line a run")
    for loss in (0.01, 0.1, 1):
        y = height(loss)
        shapes.append(f'<path d="M{LEFT} {y:.1f}h{WIDTH}" stroke="#7d8590" stroke-opacity="0.3"/>')
        text(LEFT - 8, y + 4, f"{loss:g}", "end")
    for step in range(0, steps + 1, steps // 3):
        text(LEFT + WIDTH * step / steps, TOP + HEIGHT + 18, step, "middle")
    for run in runs:
        color = COLORS[run["kind"]]
        means = [statistics.mean(run["losses"][at : at + WINDOW]) for at in range(0, steps, WINDOW)]
        points = (
            f"{LEFT + WIDTH * (at + 0.5) * WINDOW / steps:.1f},{height(mean):.1f}" for at, mean in enumerate(means)
        )
        shapes.append(f'<polyline points="{" ".join(points)}" fill="none" stroke="{color}"/>')
    for row, (kind, color) in enumerate(COLORS.items()):
        y = TOP + 16 + 18 * row
        shapes.append(f'<path d="M{LEFT + 170} {y - 4}h24" stroke="{color}" stroke-width="2"/>')
        text(LEFT + 200, y, kind)
    body = "".join(shapes)
    print(
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {LEFT + WIDTH + 20} {TOP + HEIGHT + 26}" '
        f'width="{LEFT + WIDTH + 20}" font-family="system-ui, sans-serif" font-size="13" role="img" '
        f'aria-label="Loss by step, with exact gradients and in wire formats: the lines lie together">{body}</svg>'
    )


if __name__ == "__main__":
    main()
