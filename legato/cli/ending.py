"""How a command ends before its time: one line on standard error, an exit status, and no second Ctrl-C.

`main` imports this before anything that takes long, so this file needs only the standard library.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from legato.core.interrupts import ignore, raise_once
from legato.core.text import one_line

__all__ = ["INTERRUPTED", "fail", "interruptible"]

#: The exit status after Ctrl-C, as in a shell and in typer.
INTERRUPTED = 130


def fail(message: str, status: int) -> int:
    """Print the message as one line on standard error, and return the status."""
    with suppress(OSError):  # standard error may be closed or full, too
        sys.stderr.write(f"legato: {one_line(' '.join(message.split()))}\n")
        sys.stderr.flush()
    return status


@contextmanager
def interruptible() -> Iterator[None]:
    """Let the first Ctrl-C raise `KeyboardInterrupt`, and ignore further ones until the process has ended.

    A handler other than Python's default one stays in place.
    """
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    signal.signal(signal.SIGINT, raise_once)
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGINT) is ignore:
            _end_undisturbed()
        else:
            signal.signal(signal.SIGINT, signal.default_int_handler)


def _end_undisturbed() -> None:
    """Keep the exit status as it is: the interpreter removes handlers before it ends, but not `SIG_IGN`."""
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])  # CPython reports a signal whose handler is replaced
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # After a KeyboardInterrupt inside `exec`, where dataclasses are made, `python -m` sends itself a SIGINT at its end,
    # although the interrupt was caught, and some library's thread takes it. CPython forgets it at the next `exec`.
    exec("")
