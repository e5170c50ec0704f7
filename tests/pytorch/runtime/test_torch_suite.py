"""torch's own tests of DDP pass with legato attached to every DDP in them; `torch_suite.py` runs all of them."""

import pytest
from support import torch_suite


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["flat", "overlapped"])
def test_torchs_tests_of_ddp_pass(mode):
    results = torch_suite.run_all(mode, torch_suite.SAMPLE, first_passes=1)
    assert {test: r["traceback"] or r["reason"] for test, r in results.items() if r["outcome"] != "pass"} == {}
    assert sum(r["sent"] > 0 for r in results.values()) > len(results) // 2, "legato sends in most of them"
