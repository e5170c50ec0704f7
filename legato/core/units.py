"""Formats of the quantities in which legato computes (seconds, bytes, bits per second), such as `12.3 ms`.

`quantities.py` parses such texts.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

__all__ = ["Int64", "format_bandwidth", "format_bytes", "format_seconds"]

#: A whole number of 64 bits. A larger number in a file cannot be a size, count or index.
Int64 = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]


def format_seconds(seconds: float) -> str:
    """Format a time with three significant digits and a unit, such as `12.3 ms`. A time below 1 ps becomes 0."""
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if abs(seconds) >= scale * 0.9995:
            return f"{seconds / scale:.3g} {unit}" if abs(seconds) < 999.5 else f"{seconds:,.0f} s"
    return "0 s" if abs(seconds) < 1e-12 else f"{seconds / 1e-9:.3g} ns"


def format_bytes(nbytes: float) -> str:
    """Format a size, such as `97.5 MiB`, with three significant digits and a binary unit."""
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if nbytes >= scale:
            return f"{nbytes / scale:.3g} {unit}" if nbytes < 999.5 * scale else f"{nbytes / scale:,.0f} {unit}"
    return f"{nbytes:.0f} B"


def format_bandwidth(bps: float) -> str:
    """Format a bandwidth, such as `2.5 Gbit/s`, with three significant digits and a fitting unit."""
    for unit, scale in (("Tbit/s", 1e12), ("Gbit/s", 1e9), ("Mbit/s", 1e6)):
        if bps >= scale * 0.9995:
            return f"{bps / scale:.3g} {unit}"
    return f"{bps:.3g} bit/s"
