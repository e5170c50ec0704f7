"""Names, numbers and tables as text. Names from files and models can be long and contain any character."""

from __future__ import annotations

import html
import json
from collections.abc import Sequence

__all__ = ["count", "html_table", "one_line", "percent", "shorten", "table", "with_article"]


def one_line(text: str) -> str:
    """Return the text with control characters, including line ends, as escapes."""
    return "".join(c if c.isprintable() else json.dumps(c)[1:-1] for c in text)


def shorten(name: str, most: int = 40) -> str:
    """Return the name on one line. If a name has more than `most` characters, its middle is left out."""
    name = one_line(name)
    return name if len(name) <= most else f"{name[: most // 3]}...{name[len(name) - (most - most // 3 - 3) :]}"


def count(number: int, noun: str) -> str:
    """Return a number with its noun, such as `1 tensor` or `2,000 tensors`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def with_article(noun: str) -> str:
    """Return a noun with its article, such as `a dict` or `an int`."""
    return f"{'an' if noun[:1].lower() in tuple('aeiou') else 'a'} {noun}"


def percent(share: float, decimals: int = 1, *, signed: bool = False) -> str:
    """Return a share as a percentage, such as `3.1%` for 0.031, or `+3.1%` if `signed`; 100% and more have no decimals.

    A share that rounds to zero (`0.0%`) has no sign.
    """
    text = f"{abs(share):.{decimals}%}"
    if abs(share) >= 0.9 and float(text[:-1]) >= 100:
        text = f"{abs(share):,.0%}"
    zero = not text.strip("0.%")
    return ("" if zero else "-" if share < 0 else "+" if signed else "") + text


def table(headings: Sequence[str], rows: Sequence[Sequence[str]], right: int) -> list[str]:
    """Return the lines of a table. Columns fit their widest cell, and the first `right` columns are right-aligned."""
    widths = [max(map(len, column)) for column in zip(headings, *rows, strict=True)]
    return [
        "  ".join(
            cell.rjust(width) if k < right else cell.ljust(width)
            for k, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in (headings, *rows)
    ]


def html_table(headings: Sequence[str], rows: Sequence[Sequence[str]], right: int) -> str:
    """Return a table as an HTML element for notebooks. The table has no colours of its own, but the notebook's."""

    def line(cells: Sequence[str], tag: str) -> str:
        style = [f"padding: 2px 8px; text-align: {'right' if k < right else 'left'}" for k in range(len(cells))]
        inside = (f'<{tag} style="{s}">{html.escape(one_line(c))}</{tag}>' for s, c in zip(style, cells, strict=True))
        return f"<tr>{''.join(inside)}</tr>"

    return (
        f"<table><thead>{line(headings, 'th')}</thead><tbody>{''.join(line(row, 'td') for row in rows)}</tbody></table>"
    )
