"""Print what `legato simulate --share --json` has printed as a table, and draw how much the workers compute.

    python docs/pictures/decision.py ./*.json -o decision.svg

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
    *paths, _, output = sys.argv[1:]
    found, rows = {}, {}
    for path in map(Path, paths):
        what, placement = path.stem.split("-")
        case = json.loads(path.read_text())["cases"][0]
        found[what, placement] = case["utilization"]
        rows[what, placement] = [f"{job['iteration_s'] * 1e3:.0f} ms" for job in case["jobs"]]
        rows[what, placement] += [f"{case['slowdown']:.3f}x", f"{case['utilization']:.1%}"]
    print(f"{'':<34}{'VGG-16':>9}{'BERT':>9}{'ResNet-152':>12}{'slowdown':>10}{'computing':>11}")
    for placement in COLORS:
        for what, title in TITLES.items():
            vgg, bert, resnet, slowdown, computing = rows[what, placement]
            name = f"{title}, {placement}"
            print(f"{name:<34}{vgg:>9}{bert:>9}{resnet:>12}{slowdown:>10}{computing:>11}")
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
    Path(output).write_text(
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {LEFT + WIDTH + 100} {y}" width="{LEFT + WIDTH + 100}" '
        f'font-family="system-ui, sans-serif" role="img" aria-label="Utilization of the mix of jobs, by what is bought '
        f'and how jobs are placed">{body}</svg>\n'
    )


if __name__ == "__main__":
    main()
