"""A network that stops carrying anything: every rank ends with an error, in the time that the process group has."""

import re

import pytest
from support import environment

from legato.lab.testbed.hosts import why_unavailable
from legato.lab.testbed.launch import run_workers

WHY_NOT = why_unavailable()


@pytest.mark.slow
@pytest.mark.skipif(WHY_NOT != "", reason=WHY_NOT)
def test_every_rank_ends_and_names_who_is_cut_off(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", environment()["PYTHONPATH"])
    run_workers(["support.stalled", str(tmp_path)], 3, tmp_path / "log", lambda *_: None, 1e9)
    said = [(tmp_path / f"{rank}.txt").read_text() for rank in range(3)]
    for rank, text in enumerate(said):
        assert re.search(rf"rank {rank}: message \d+ \([01]\.(weight|bias)\) of backward pass \d+ failed after", text)
        assert list(tmp_path.glob(f"legato-flight-rank{rank}-*.jsonl"))
    for rank in (0, 2):
        assert "rank 1 does not answer (killed, stopped or cut off)" in said[rank]
    assert "no rank could be asked: the store is gone" in said[1]
