"""How a command fails or is interrupted: it prints one line, sets an exit status, and ignores a second Ctrl-C.

`main` imports this module before the slow imports. So this module imports only modules that need nothing but the
standard library.
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

    If a handler other than Python's default is installed, it stays in place.
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
    """Make the interpreter ignore Ctrl-C while it ends. As Python ends, it removes handlers, but keeps `SIG_IGN`."""
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])  # CPython reports a signal whose handler is replaced
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # If a KeyboardInterrupt was raised inside `exec` (where dataclasses are made), `python -m` sends itself a SIGINT at
    # its end, even if the interrupt was caught. A thread of some library may receive it. Another `exec` resets this.
    exec("")
