import pytest

import legato


@pytest.fixture
def workload(tmp_path):
    """The file of a workload: forward 10 ms, backward 20 ms, 5 MB."""
    path = tmp_path / "w.json"
    ops = [legato.Op("f", "forward", 0.01), legato.Op("b", "backward", 0.02, (0,))]
    tensors = [legato.Tensor("w", 4_000_000, 1, (0,)), legato.Tensor("v", 1_000_000, 1, (0,))]
    legato.write(path, legato.Workload("toy", tuple(ops), tuple(tensors)))
    return path
