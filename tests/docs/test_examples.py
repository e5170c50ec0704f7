"""The examples run as their docstrings say."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
pytestmark = pytest.mark.processes


def torchrun(script, *arguments, ranks=2, options=()):
    pytest.importorskip("torch")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), *options]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    result = subprocess.run(
        [*command, str(EXAMPLES / script), *arguments], capture_output=True, text=True, timeout=300, env=environment
    )
    assert result.returncode == 0, result.stderr
    return result.stdout + result.stderr


@pytest.mark.parametrize("framework", ["lightning", "accelerate", "transformers"])
def test_frameworks(framework):
    pytest.importorskip(framework)
    said = torchrun(f"with_{framework}.py")
    assert re.search(r"on 2 ranks, weights add up to -?\d+\.\d+", said)
    assert "staying with the plan" not in said


def test_after_a_death_the_run_goes_on_from_its_checkpoint(tmp_path):
    undisturbed = torchrun("elastic.py", "--checkpoint", str(tmp_path / "a.pt"))
    with_a_death = torchrun(
        "elastic.py", "--checkpoint", str(tmp_path / "b.pt"), "--die-at", "7", options=("--max-restarts", "2")
    )
    done = re.compile(r"steps (\d+) to 20 done on 2 ranks, loss (\d+\.\d+)")
    (start, loss), (again, same) = done.search(undisturbed).groups(), done.search(with_a_death).groups()
    assert (start, again) == ("0", "5") and loss == same
