"""Names and numbers as text. Names from files and models can be long and contain any character."""

from __future__ import annotations

import json

__all__ = ["count", "one_line", "percent", "shorten", "with_article"]


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
