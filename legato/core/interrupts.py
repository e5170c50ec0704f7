"""Ctrl-C: raised once, held back where it would do harm, and kept from the workers on this machine.

[Note: Ctrl-C] The terminal sends SIGINT to all processes of a command. Only the main thread of the command itself
reacts. What a `KeyboardInterrupt` ends has to clean up, and a second one would interrupt that. Where one would do harm
anywhere (while processes are started, or inside a library's locks and callbacks), it is held back until a place where
it does none.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType

__all__ = ["held_back", "ignore", "kept_from_children", "raise_once"]


def ignore(number: int, frame: FrameType | None) -> None:
    """A handler that does nothing. Unlike `SIG_IGN`, it also serves a signal that is already on its way to a handler,
    and which CPython would report on standard error."""


def raise_once(number: int, frame: FrameType | None) -> None:
    """A handler that raises `KeyboardInterrupt`, and from then on ignores the signal."""
    signal.signal(number, ignore)
    raise KeyboardInterrupt


@contextmanager
def held_back() -> Iterator[Sequence[object]]:
    """Collect the interrupts inside the block, and handle the first of them at its end.

    Yields what it has collected. Has no effect outside of the main thread, or where nothing handles
    SIGINT.
    """
    held: list[tuple[int, FrameType | None]] = []
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield held
        return
    signal.signal(signal.SIGINT, lambda number, frame: held.append((number, frame)))
    try:
        yield held
    finally:
        signal.signal(signal.SIGINT, handler)
        if held:
            handler(*held[0])


@contextmanager
def kept_from_children() -> Iterator[None]:
    """Keep Ctrl-C for good from the threads and processes that are started inside the block: they inherit its mask."""
    from multiprocessing import resource_tracker  # only sweeps need it

    resource_tracker.ensure_running()  # when it starts inside the block, CPython 3.11 and 3.12 unblock SIGINT
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
