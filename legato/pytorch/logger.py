"""The logger `legato`, through which legato says everything that it has to say while a program trains.

Decisions have the level INFO. What costs time, or falls back to DDP, has the level WARNING. Unless the program has
given the logger a handler, `show_lines` adds one that writes to standard error.
"""

from __future__ import annotations

import contextlib
import logging
import sys

__all__ = ["logger", "show_lines"]

logger = logging.getLogger("legato")


class _StandardError(logging.Handler):
    """Writes lines to what is standard error at that moment; a line that cannot be written is lost."""

    def emit(self, record: logging.LogRecord) -> None:
        with contextlib.suppress(Exception):  # none, closed, or a pipe without a reader
            sys.stderr.write(f"{self.format(record)}\n")
            sys.stderr.flush()


def show_lines() -> None:
    """Write lines from INFO on to standard error, unless the program has set another handler or level."""
    if not logger.handlers:
        handler = _StandardError()
        handler.setFormatter(logging.Formatter("legato: %(message)s"))
        logger.addHandler(handler)
        logger.propagate = False
    if logger.level == logging.NOTSET:
        logger.setLevel(logging.INFO)
