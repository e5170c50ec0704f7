"""`legato`, and `python -m legato`."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from legato.cli.ending import INTERRUPTED, fail, interruptible

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command, and end the process with its exit status."""
    with interruptible():
        try:
            from legato.commands import run  # slow, and Ctrl-C may come during it

            status = run(arguments)
        except KeyboardInterrupt:  # before typer starts, or after it ends
            status = fail("interrupted", INTERRUPTED)
    sys.exit(status)


if __name__ == "__main__":
    main()
