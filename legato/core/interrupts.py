"""Signal handlers that let only the first Ctrl-C interrupt, because a second one must not interrupt the cleanup."""

from __future__ import annotations

import signal
from types import FrameType

__all__ = ["ignore", "raise_once"]


def ignore(number: int, frame: FrameType | None) -> None:
    """Handle a signal by doing nothing.

    `SIG_IGN` is not enough: if a signal is already on its way to a handler, CPython would report it on standard error.
    """


def raise_once(number: int, frame: FrameType | None) -> None:
    """Handle a signal by raising `KeyboardInterrupt`, and ignore the signal from then on."""
    signal.signal(number, ignore)
    raise KeyboardInterrupt
