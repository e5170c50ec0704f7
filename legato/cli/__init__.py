"""The command line: one file per verb, all of them in `commands`, shared options in `options`, printing in `output`."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from legato.cli.ending import INTERRUPTED, fail, interruptible

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command, and end the process with its exit status."""
    with interruptible():
        try:
            from legato.cli.commands import run  # takes long, and Ctrl-C may come meanwhile

            status = run(arguments)
        except KeyboardInterrupt:  # before typer has begun, or after
            status = fail("interrupted", INTERRUPTED)
    sys.exit(status)
