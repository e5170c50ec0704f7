"""What several tests share: strategies, samples, worker processes and what they run."""

import os
from pathlib import Path

#: Whatever takes longer than this hangs. Nothing that works waits for it, so it is far more than the slowest machine
#: needs.
PATIENCE_S = 900


def environment(**variables):
    """The environment of a process that imports `support` too."""
    path = [str(Path(__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path), **variables}
