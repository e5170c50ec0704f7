"""A workload to rehearse, and the commands that do."""

import subprocess
import sys

import pytest

from legato.core.workload import Op, Tensor, Workload
from legato.testbed.hosts import why_unavailable
from support import PATIENCE_S

WHY_NOT = why_unavailable()
needs_hosts = pytest.mark.skipif(WHY_NOT != "", reason=WHY_NOT)
LAYERS = 6


def workload(nbytes=200_000, op_s=0.004):
    """A chain of layers, one parameter each."""
    forward = [Op(f"f{i}", "forward", op_s, (i - 1,) if i else ()) for i in range(LAYERS)]
    backward = [Op(f"b{i}", "backward", 2 * op_s, (LAYERS + i - 1,)) for i in range(LAYERS)]
    tensors = [Tensor(f"layer{LAYERS - 1 - i}.weight", nbytes, LAYERS + i, (LAYERS - 1 - i,)) for i in range(LAYERS)]
    return Workload("chain", (*forward, *backward), tuple(tensors))


def run(arguments, **options):
    return subprocess.run(arguments, capture_output=True, text=True, timeout=PATIENCE_S, check=False, **options)


def legato(*arguments):
    return run([sys.executable, "-m", "legato.cli", *map(str, arguments)])
