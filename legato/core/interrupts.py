"""Signal handlers that let only the first Ctrl-C interrupt, because a second one must not interrupt the cleanup."""

from __future__ import annotations

import signal
from types import FrameType

__all__ = ["ignore", "raise_once"]


def ignore(number: int, frame: FrameType | None) -> None:
    """Handle a signal by doing nothing.

    `SIG_IGN` is not enough: if a signal arrived just before `SIG_IGN` was set, CPython would print an error for this
    signal.
    """


def raise_once(number: int, frame: FrameType | None) -> None:
    """Handle a signal by raising `KeyboardInterrupt`, and ignore the signal from then on."""
    signal.signal(number, ignore)
    raise KeyboardInterrupt
