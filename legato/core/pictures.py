"""Pictures for notebooks (bars of times, GPUs of hosts), as SVG elements without scripts or external files."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence

from legato.core.text import one_line, percent, shorten
from legato.core.units import format_seconds

__all__ = ["draw_bars", "draw_hosts"]

#: Colours that are legible on light and on dark backgrounds. Parts without a colour in this table get the last colour.
_COLOURS = {
    "computing": "#2f6db5",
    "bubble": "#a3aab3",
    "waiting": "#a3aab3",
    "tensor": "#c8553d",
    "context": "#7a8b1e",
    "expert": "#c46fa0",
    "pipeline": "#4aa3c7",
    "data": "#1b8a77",
    "optimizer": "#9a4f96",
    "exposed": "#1b8a77",
    "late ranks": "#c8553d",
    "host": "#a3aab3",
    "iteration": "#e08a1e",
}
_WIDTH, _LEFT, _BAR, _TOP = 970, 10, 16, 52  # all in pixels; each bar is below its name
_MOST_BARS = 40

#: A bar: its name, the seconds of each part, and a text after the name.
Bar = tuple[str, Mapping[str, float], str]


def draw_bars(bars: Sequence[Bar], title: str) -> str:
    """Return bars below each other on one time axis, each below its name; if there are many, draw only the first."""
    shown = bars[:_MOST_BARS]
    longest = max((sum(parts.values()) for _, parts, _ in shown), default=0.0) or 1.0
    kinds = list(dict.fromkeys(kind for _, parts, _ in shown for kind in parts if parts[kind] > 1e-9 * longest))
    drawn = [_text(_LEFT, 15, shorten(title, 150), "bold")]
    for k, kind in enumerate(kinds):
        drawn.append(f'<rect x="{_LEFT + 100 * k}" y="26" width="10" height="10" fill="{_colour(kind)}"/>')
        drawn.append(_text(_LEFT + 100 * k + 14, 35, kind))
    for row, (name, parts, note) in enumerate(shown):
        y, x, whole = _TOP + 40 * row, float(_LEFT), sum(parts.values()) or 1.0
        drawn.append(_text(_LEFT, y + 12, "  ".join(text for text in (shorten(name, 150), note) if text)))
        for kind in kinds:
            seconds = parts.get(kind, 0.0)
            width = (_WIDTH - 2 * _LEFT) * seconds / longest
            said = html.escape(f"{kind} {format_seconds(seconds)}, {percent(seconds / whole)}")
            shape = f'x="{x:.1f}" y="{y + 17}" width="{width:.1f}" height="{_BAR}" fill="{_colour(kind)}"'
            drawn.append(f"<rect {shape}><title>{said}</title></rect>")
            x += width
    return _picture(drawn, _TOP + 40 * len(shown), len(bars) - len(shown))


def draw_hosts(gpus: Sequence[tuple[int, str]], gpus_per_host: int, hosts: int, title: str) -> str:
    """Return a picture of hosts, one row each.

    The number and the colour of a GPU show its group; a tooltip describes the GPU.
    """
    drawn, colours = [_text(_LEFT, 15, shorten(title, 150), "bold")], list(dict.fromkeys(_COLOURS.values()))
    width = max(3, min(60, (_WIDTH - 90) // gpus_per_host))
    for rank, (number, said) in enumerate(gpus):
        host, place = divmod(rank, gpus_per_host)
        x, y = 80 + width * place, 26 + 26 * host
        if place == 0:
            drawn.append(_text(_LEFT, y + 15, f"host {host}"))
        colour = colours[number % len(colours)]
        shape = f'x="{x}" y="{y}" width="{width - 2}" height="22" fill="{colour}"'
        drawn.append(f"<rect {shape}><title>{html.escape(said)}</title></rect>")
        if width > 20:
            drawn.append(f'<text x="{x + 6}" y="{y + 15}" fill="white">{number}</text>')
    shown = -(-len(gpus) // gpus_per_host)
    return _picture(drawn, 30 + 26 * shown, hosts - shown)


def _picture(drawn: list[str], height: int, more: int) -> str:
    if more > 0:
        drawn.append(_text(_LEFT, height + 8, f"and {more:,} more"))
        height += 16
    box = f'viewBox="0 0 {_WIDTH} {height}" style="max-width: {_WIDTH}px" font-family="sans-serif" font-size="12"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {box}>{"".join(drawn)}</svg>'


def _colour(kind: str) -> str:
    return _COLOURS.get(kind, _COLOURS["iteration"])


def _text(x: float, y: float, content: str, weight: str = "normal") -> str:
    style = f'font-weight="{weight}" fill="currentColor"'
    return f'<text x="{x:.0f}" y="{y:.0f}" {style}>{html.escape(one_line(content))}</text>'
