"""Draw the step of whole jobs on several networks, from what `legato sweep --json` has printed.

    python docs/pictures/networks.py rows.json -o networks.svg

docs/tutorials/whole_jobs.md makes the file.
"""

import json
import sys
from pathlib import Path

#: What a step consists of, from the ground up.
COLORS = {
    "computing": "#2b6cb0",
    "bubble": "#8a93a0",
    "tensor": "#b4561a",
    "context": "#d69e2e",
    "data": "#38803e",
    "pipeline": "#805ad5",
}
LEFT, WIDTH, HEIGHT, GAP = 180, 460, 20, 22


def main():
    rows, _, output = sys.argv[1:]
    cells = json.loads(Path(rows).read_text())
    longest_s = max(cell["step_s"] for cell in cells)
    shapes, y, x = [], 30, LEFT

    def text(x, y, content, anchor="start", weight="400"):
        shapes.append(
            f'<text x="{x:.0f}" y="{y}" fill="#7d8590" text-anchor="{anchor}" font-size="13" '
            f'font-weight="{weight}">{content}</text>'
        )

    for kind, color in COLORS.items():
        shapes.append(f'<rect x="{x}" y="4" width="12" height="12" fill="{color}"/>')
        text(x + 16, 15, kind)
        x += 34 + 7 * len(kind)
    job = None
    for cell in cells:
        if cell["job"] != job:
            job = cell["job"]
            y += GAP
            text(LEFT, y - 5, job.removesuffix(".json"), weight="600")
        text(LEFT - 10, y + 15, f"{cell['bandwidth_bps'] / 1e9:g} Gbit/s", "end")
        x = LEFT
        for kind, color in COLORS.items():
            width = WIDTH * cell[f"{kind}_s"] / longest_s
            shapes.append(f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{HEIGHT}" fill="{color}"/>')
            x += width
        text(x + 6, y + 15, f"{cell['step_s']:.1f} s")
        y += HEIGHT + 2
    body = "".join(shapes)
    Path(output).write_text(
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {LEFT + WIDTH + 70} {y + 4}" '
        f'width="{LEFT + WIDTH + 70}" font-family="system-ui, sans-serif" role="img" '
        f'aria-label="What a step consists of, by layout and by bandwidth (predicted)">{body}</svg>\n'
    )


if __name__ == "__main__":
    main()
