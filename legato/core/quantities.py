"""Parsers of quantities: `10Gbit`, `30us`, `25MiB` become bits per second, seconds and bytes.

The rest of legato computes in these units; `units.py` formats them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from decimal import Context, Decimal

from legato.core.errors import InputError

__all__ = ["parse_bandwidth", "parse_bytes", "parse_flops", "parse_seconds"]

_TIME = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "ns": 1e-9}
_RATE = {"bit": 1.0, "kbit": 1e3, "mbit": 1e6, "gbit": 1e9, "tbit": 1e12}
_RATE |= {f"{unit}ps": scale for unit, scale in list(_RATE.items())}
_RATE |= {"bps": 1.0, "kbps": 1e3, "mbps": 1e6, "gbps": 1e9, "tbps": 1e12}
_RATE |= {f"{unit}/s": scale for unit, scale in list(_RATE.items())}
_SIZE = {"b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "kib": 2**10, "mib": 2**20, "gib": 2**30}
_SPEED = {"g": 1e9, "t": 1e12, "p": 1e15}
_SPEED |= {f"{unit}{suffix}": scale for unit, scale in list(_SPEED.items()) for suffix in ("flops", "flop/s")}
#: Values above these limits are typing errors, or could overflow in later arithmetic.
_LONGEST_S = 1e9
_SLOWEST_BPS, _FASTEST_BPS = 1.0, 1e18
#: The context makes `30us` the same float as 30e-6, and makes numbers that are too large infinite.
_EXACT = Context(prec=60, traps=[])
_QUANTITY = re.compile(r"\s*([0-9]*\.?[0-9]+(?:[eE][-+]?[0-9]+)?)\s*([A-Za-zµ/]*)\s*")


def _parse(text: str, units: Mapping[str, float], bare: str | None, expected: str) -> Decimal:
    match = _QUANTITY.fullmatch(text)
    if match:
        number, unit = match.groups()
        scale = units.get(unit.lower() or bare or "")
        if scale is not None:
            value = _EXACT.multiply(_EXACT.create_decimal(number), _EXACT.create_decimal(repr(scale)))
            if math.isfinite(float(value)):
                return value
    raise InputError(f"{text!r} is not {expected}")


def parse_bandwidth(text: str) -> float:
    """Parse a bandwidth such as `10Gbit` or `0.5Gbit` (powers of ten) into bits per second. Raises `InputError`."""
    value = float(_parse(text, _RATE, None, "a bandwidth like 10Gbit or 500Mbit"))
    if value <= 0:
        raise InputError(f"{text!r} is not a bandwidth above zero")
    if not _SLOWEST_BPS <= value <= _FASTEST_BPS:
        raise InputError(f"{text!r} is not a bandwidth of 1bit to 1000000Tbit")
    return value


def parse_seconds(text: str) -> float:
    """Parse a time such as `30us`, `1.5ms`, `2s`, or `0` without a unit, into seconds. Raises `InputError`."""
    if text.strip() == "0":
        return 0.0
    value = float(_parse(text, _TIME, None, "a time like 30us, 1.5ms or 2s"))
    if value > _LONGEST_S:
        raise InputError(f"{text!r} is not a time of at most {_LONGEST_S:.0e}s")
    return value


def parse_bytes(text: str) -> int:
    """Parse a size such as `25MiB` (powers of two), `4kB` (powers of ten) or `4096` into bytes. Raises `InputError`."""
    value = _parse(text, _SIZE, "b", "a size like 25MiB, 4kB or 4096")
    if value != int(value):
        raise InputError(f"{text!r} is not a whole number of bytes")
    return int(value)


def parse_flops(text: str) -> float:
    """Parse a rate such as `10T` or `312TFLOPS` into floating-point operations per second. Raises `InputError`."""
    value = float(_parse(text, _SPEED, None, "a speed like 10T or 900G (FLOP/s)"))
    if value <= 0:
        raise InputError(f"{text!r} is not a speed above zero")
    return value
