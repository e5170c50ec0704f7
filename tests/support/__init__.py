"""What several tests share: strategies, samples, worker processes and what they run."""

import os
from pathlib import Path


def environment(**variables):
    """The environment of a process that imports `support` too."""
    path = [str(Path(__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path), **variables}
