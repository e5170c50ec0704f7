"""The examples: one under torchrun itself, the others on ranks that torch need not be imported for again."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from support import PATIENCE_S
from support.ranks import run_script

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
pytestmark = pytest.mark.slow


def torchrun(script, *arguments, ranks=2, options=()):
    pytest.importorskip("torch")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), *options]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    result = subprocess.run(
        [*command, str(EXAMPLES / script), *arguments],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        env=environment,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout + result.stderr


@pytest.mark.parametrize("framework", ["lightning", "accelerate", "transformers"])
def test_frameworks(framework, tmp_path):
    pytest.importorskip(framework)
    said = run_script([str(EXAMPLES / f"with_{framework}.py")], tmp_path, ranks=2)
    assert re.search(r"on 2 ranks, weights add up to -?\d+\.\d+", said)
    assert "staying with the plan" not in said


def test_the_first_example(tmp_path):
    said = run_script([str(EXAMPLES / "train.py")], tmp_path, ranks=2)
    assert re.findall(r"step (\d+): loss \d+\.\d+, plan \w", said) == ["50", "100", "150", "200", "250", "300"]


def test_after_a_death_the_run_goes_on_from_its_checkpoint(tmp_path):
    undisturbed = run_script([str(EXAMPLES / "elastic.py"), "--checkpoint", "a.pt"], tmp_path, ranks=2)
    with_a_death = torchrun(
        "elastic.py", "--checkpoint", str(tmp_path / "b.pt"), "--die-at", "7", options=("--max-restarts", "2")
    )
    done = re.compile(r"steps (\d+) to 20 done on 2 ranks, loss (\d+\.\d+)")
    (start, loss), (again, same) = done.search(undisturbed).groups(), done.search(with_a_death).groups()
    assert (start, again) == ("0", "5") and loss == same


def test_sharded_training_by_block_and_by_a_plan(tmp_path):
    """The loss is the same: with two ranks, other groups add up gradients in the same order."""
    groups = [{"modules": ["embed", "blocks.0", "blocks.1"]}, {"modules": ["blocks.2", "blocks.3"], "reshard": False}]
    wrapping = {"format": "legato.wrapping/1", "name": "by hand", "groups": groups}
    (tmp_path / "wrapping.json").write_text(json.dumps(wrapping))
    losses = [
        re.search(r"loss (\d+\.\d+)", run_script([str(EXAMPLES / "shard.py"), *arguments], tmp_path, ranks=2))[1]
        for arguments in ([], ["wrapping.json"])
    ]
    assert losses[0] == losses[1]
    assert {"rank0.json", "rank1.json"} <= {path.name for path in tmp_path.iterdir()}
