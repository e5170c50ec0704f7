"""The grid of `schedulers.py` as a static picture that is readable on light and dark pages."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

__all__ = ["draw"]

#: One collective of the grid; the others look alike.
COLLECTIVE = "ring"
#: The speedup of the strongest colour.
FULL = 2.0
LEFT, TOP, WIDE, HIGH, APART = 118, 92, 41, 29, 10
BARS, NAMED = 20, 6
STYLE = """
svg { --ink: #1b2430; --soft: #5d6876; --heat: #1b8a77; --page: #ffffff; --line: #e6e9ed; --on: #ffffff;
  --s0: #2f6db5; --s1: #e08a1e; --s2: #c22f4e; --s3: #7d5fb2; --s4: #8a6d3b; --s5: #9aa6b4; }
@media (prefers-color-scheme: dark) { svg { --ink: #e7ebf0; --soft: #9aa6b4; --heat: #3cb8a3; --page: #0d1117;
  --line: #2b333f; --on: #0d1117; --s0: #5d9ae1; --s1: #e8a650; --s2: #f0738c; --s3: #a58ad6; --s4: #c2a36b;
  --s5: #5d6876; } }
text { font: 12px system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; fill: var(--ink); }
.title { font-size: 15px; font-weight: 600; } .soft { fill: var(--soft); } .small { font-size: 11px; }
.on { fill: var(--on); } .middle { text-anchor: middle; } .end { text-anchor: end; }
"""


def draw(cells: Sequence[dict[str, Any]]) -> str:
    """An SVG of how much faster than DDP legato is, and of which published scheduler comes closest to it."""
    shown = [c for c in cells if c["collective"] == COLLECTIVE]
    models, gigabits, workers = ([*dict.fromkeys(c[key] for c in shown)] for key in ("model", "gigabits", "workers"))
    wins = Counter(c["best_other"] for c in cells)
    colours = {name: f"var(--s{min(k, NAMED - 1)})" for k, (name, _) in enumerate(wins.most_common())}
    group = len(workers) * WIDE + APART
    width = LEFT + len(gigabits) * group + 6
    bars_top = TOP + len(models) * HIGH + 62
    height = bars_top + len(wins) * BARS + 14
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
        f' role="img" aria-label="Speed of legato over DDP by model, bandwidth and workers">',
        f"<style>{STYLE}</style>",
        f'<rect width="{width}" height="{height}" rx="8" fill="var(--page)"/>',
        _text(16, 28, "How many times faster than DDP", "title"),
        _text(16, 47, f"an iteration of legato's plan, predicted; {COLLECTIVE} all-reduce", "soft"),
    ]
    for i, rate in enumerate(gigabits):
        x = LEFT + i * group
        parts.append(_text(x + (group - APART) / 2, TOP - 22, f"{rate} Gbit/s", "middle"))
        parts += [_text(x + (k + 0.5) * WIDE, TOP - 6, str(n), "soft small middle") for k, n in enumerate(workers)]
    parts.append(_text(LEFT - 10, TOP - 6, "workers", "soft small end"))
    for row, model in enumerate(models):
        parts.append(_text(LEFT - 10, TOP + row * HIGH + 15, model, "end"))
    for c in shown:
        x = LEFT + gigabits.index(c["gigabits"]) * group + workers.index(c["workers"]) * WIDE
        parts += _cell(x, TOP + models.index(c["model"]) * HIGH, c, colours)
    parts += _bars(cells, wins, colours, bars_top, width)
    return "\n".join([*parts, "</svg>", ""])


def _cell(x: float, y: float, cell: dict[str, Any], colours: dict[str, str]) -> Iterator[str]:
    """How much over DDP, and a stripe in the colour of the best of the others."""
    gain = cell["over_ddp"]
    heat = 0.05 + 0.95 * min(1.0, math.log(max(gain, 1.0)) / math.log(FULL))
    label = f"{gain:.2f}" if gain < 9.995 else f"{gain:.0f}"
    box = f'x="{x + 1}" y="{y}" width="{WIDE - 2}" height="{HIGH - 8}" rx="3"'
    yield f'<rect {box} fill="var(--heat)" fill-opacity="{heat:.2f}"/>'
    best = colours[cell["best_other"]]
    yield f'<rect x="{x + 3}" y="{y + HIGH - 7}" width="{WIDE - 6}" height="3" rx="1.5" fill="{best}"/>'
    yield _text(x + WIDE / 2, y + 14, label, "small middle on" if heat > 0.8 else "small middle")


def _bars(
    cells: Sequence[dict[str, Any]], wins: Counter[str], colours: dict[str, str], top: float, width: float
) -> Iterator[str]:
    """In how many cells each published scheduler is the best of them, and how far behind legato it is over all."""
    across = (width - LEFT - 330) / max(wins.values())
    title = f"The best of the published schedulers: a stripe above, and in how many of all {len(cells)} cells"
    yield _text(16, top - 22, title, "title")
    yield _text(width - 16, top - 22, "legato faster, median and most", "soft small end")
    for k, (name, count) in enumerate(wins.most_common()):
        y = top + k * BARS
        ahead = [c["seconds"][name] / c["seconds"]["legato"] for c in cells]
        yield _text(LEFT - 10, y + 11, name, "end")
        long = max(2, count * across)
        yield f'<rect x="{LEFT}" y="{y}" width="{long:.1f}" height="13" rx="2" fill="{colours[name]}"/>'
        yield _text(LEFT + long + 6, y + 11, str(count), "soft small")
        yield _text(width - 16, y + 11, f"{statistics.median(ahead):.2f}x, {max(ahead):.1f}x", "small end")


def _text(x: float, y: float, text: str, style: str = "") -> str:
    return f'<text x="{x:g}" y="{y:g}" class="{style}">{text}</text>'
