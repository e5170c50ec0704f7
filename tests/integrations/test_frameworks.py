"""Trainings under frameworks, with legato attached after they have prepared everything: DDP's weights, bit for bit."""

import json
from pathlib import Path

import pytest
import support
from support.ranks import run_script

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("framework", ["accelerate", "lightning", "transformers"])
def test_weights_are_those_of_ddp(framework, tmp_path):
    pytest.importorskip(framework)
    said = run_script([str(Path(support.__file__).parent / "frameworks.py"), framework], tmp_path, ranks=2)
    found = json.loads(next(line for line in said.splitlines() if line.startswith('{"')))
    assert {case: distance for case, (distance, _) in found.items()} == dict.fromkeys(found, 0.0)
    # The passes of Lightning's manual optimization stay DDP's.
    assert {case for case, (_, passes) in found.items() if passes > 3} == set(found) - {"manual"}
