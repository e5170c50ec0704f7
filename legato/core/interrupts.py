"""Handlers that raise Ctrl-C only once, since a second Ctrl-C must not interrupt the cleanup after the first."""

from __future__ import annotations

import signal
from types import FrameType

__all__ = ["ignore", "raise_once"]


def ignore(number: int, frame: FrameType | None) -> None:
    """Handle a signal by doing nothing.

    Unlike `SIG_IGN`, this handler also works for a signal that is already on its way to a handler, which CPython would
    otherwise report on standard error.
    """


def raise_once(number: int, frame: FrameType | None) -> None:
    """Handle a signal by raising `KeyboardInterrupt`, and ignore the signal from then on."""
    signal.signal(number, ignore)
    raise KeyboardInterrupt
