"""Handlers that raise Ctrl-C once: the first one starts a cleanup, which a second one must not interrupt."""

from __future__ import annotations

import signal
from types import FrameType

__all__ = ["ignore", "raise_once"]


def ignore(number: int, frame: FrameType | None) -> None:
    """Handle a signal by doing nothing.

    Unlike `SIG_IGN`, this also serves a signal that is already on its way to a handler; CPython would report that
    signal on standard error.
    """


def raise_once(number: int, frame: FrameType | None) -> None:
    """Handle a signal by raising `KeyboardInterrupt`, and ignore the signal from then on."""
    signal.signal(number, ignore)
    raise KeyboardInterrupt
