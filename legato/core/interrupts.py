"""Ctrl-C, raised once: what it ends has to clean up, and a second one would interrupt that."""

from __future__ import annotations

import signal
from types import FrameType

__all__ = ["ignore", "raise_once"]


def ignore(number: int, frame: FrameType | None) -> None:
    """A handler that does nothing. Unlike `SIG_IGN`, it also serves a signal that is already on its way to a handler,
    and which CPython would report on standard error."""


def raise_once(number: int, frame: FrameType | None) -> None:
    """A handler that raises `KeyboardInterrupt`, and from then on ignores the signal."""
    signal.signal(number, ignore)
    raise KeyboardInterrupt
