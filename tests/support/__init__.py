"""What several tests share: strategies, samples, worker processes and what they run."""

import os
from pathlib import Path

#: Whatever takes longer than this hangs. Nothing that works waits for it, so it is far more than the slowest machine
#: needs.
PATIENCE_S = int(os.environ.get("LEGATO_PATIENCE_S", 900))


def environment(**variables):
    """The environment of a process that imports `support` too."""
    path = [str(Path(__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path), **variables}


def unmeasured():
    """The environment of a process that gets a signal: coverage would handle SIGTERM itself, and Ctrl-C may come while
    it holds its lock, which it then waits for until the end of time."""
    return {name: value for name, value in os.environ.items() if not name.startswith("COVERAGE")}
