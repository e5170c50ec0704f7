"""The main job, through the real command line, on the smaller model, over shaped links where they can be had."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from support import PATIENCE_S

pytest.importorskip("torch")
pytest.importorskip("transformers")

import legato
from legato.core.errors import InputError
from legato.lab import demo
from legato.lab.testbed.hosts import why_unavailable

pytestmark = pytest.mark.slow

#: Fast enough that the test computes for most of its time, and slow enough for a busy machine to keep up.
BANDWIDTH, BITS_PER_SECOND = "2Gbit", 2e9


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    folder = tmp_path_factory.mktemp("demo")
    command = [str(Path(sys.executable).with_name("legato")), "demo", "--model", "gpt2-small", "--steps", "4"]
    shaped = [] if why_unavailable() else ["--bandwidth", BANDWIDTH]
    done = subprocess.run(
        [*command, *shaped, "-o", folder, "--json"],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        env={**os.environ},
    )
    assert done.returncode == 0, done.stderr
    return folder, json.loads(done.stdout)


def test_what_it_says(job):
    _, (result,) = job
    assert result["model"] == "gpt2-small"
    assert result["weights_equal"] is True and result["max_relative_difference"] == 0.0
    for key in ("ddp_s", "legato_s", "predicted_s", "lower_bound_s"):
        assert result[key] > 0
    assert result["predicted_s"] >= result["lower_bound_s"] * (1 - 1e-9)


def test_what_it_leaves(job):
    folder, (result,) = job
    workload = legato.read(folder / "gpt2-small" / "workload.json", legato.Workload)
    cluster = legato.read(folder / "gpt2-small" / "cluster.json", legato.Cluster)
    plan = legato.read(folder / "gpt2-small" / "plan.json", legato.Plan)
    legato.check_plan(plan, workload)
    assert plan.workload_id == legato.identity(workload)
    assert plan.scheduler == result["scheduler"] and cluster.workers == 2
    page = Path(result["report"]).read_text()
    assert "gpt2-small" in page and "<script" in page
    events = json.loads(Path(result["trace"]).read_text())["traceEvents"]
    processes = {e["args"]["name"] for e in events if e["ph"] == "M" and e["name"] == "process_name"}
    assert len(processes) == (4 if result["scheduler"] != "ddp" else 3)  # predicted and measured


@pytest.mark.skipif(why_unavailable() != "", reason=why_unavailable())
def test_the_links_are_no_faster_than_was_asked_for(job):
    """On two workers an all-reduce of n bytes takes n bytes over each link in each direction: 8 n / bandwidth.

    On a busy machine they are slower.
    """
    folder, _ = job
    cluster = legato.read(folder / "gpt2-small" / "cluster.json", legato.Cluster)
    ideal = 8 / BITS_PER_SECOND
    assert 0.8 * ideal < cluster.cost().beta_s_per_byte < 6 * ideal


def test_what_was_captured(job):
    """GPT-2 ties its output layer to its embedding: one tensor, read by two forward ops."""
    folder, _ = job
    workload = legato.read(folder / "gpt2-small" / "workload.json", legato.Workload)
    (embedding,) = [t for t in workload.tensors if t.name == "transformer.wte.weight"]
    assert sum(workload.ops[r].phase == "forward" for r in embedding.readers) == 2
    assert workload.untraced_s > 0 and workload.time_scale > 0  # at the pace that calibration found


def test_one_worker_has_nobody_to_talk_to(tmp_path):
    with pytest.raises(InputError, match="at least 2"):
        demo.run("gpt2-small", 1, 4, tmp_path, lambda *_: None)
