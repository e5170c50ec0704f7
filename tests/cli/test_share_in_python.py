"""What `legato simulate --share` asks, asked in Python."""

import json

import pytest
from support.command import run

import legato
from legato.core.errors import InputError


def test_workloads_as_on_the_command_line(capsys, workload):
    """The case of `legato simulate --share`, with the same arguments."""
    job = legato.read(workload, legato.Workload)
    options = ("--fabric", "ring,tree", "--workers", "3,2", "--hosts", "spread", "--racks", 2, "--oversubscription", 4)
    status, out, _ = run(
        capsys, "simulate", workload, workload, "--share", *options, "--priority", "2,1", "--shift", "0,1ms", "--json"
    )
    network = {"racks": 2, "oversubscription": 4.0}
    how = {"fabric": ["ring", "tree"], "workers": [3, 2], "priority": [2, 1], "shift_s": [0, 1e-3], "hosts": "spread"}
    found = legato.share([job, job], **how, **network)
    assert status == 0 and json.loads(json.dumps(found.rows)) == json.loads(out)["cases"]
    assert "toy 1" in str(found) and "<table>" in found._repr_html_()
    assert [timeline.name for timeline in found.timelines()] == ["toy 1", "toy 2"]


def test_whole_jobs_as_on_the_command_line(capsys, tmp_path):
    path = tmp_path / "j.json"
    layout = ["--tensor", 4, "--data", 4, "--microbatches", 2, "--shard", "optimizer"]
    assert run(capsys, "workload", "llama-3-8b", *layout, "-o", path)[0] == 0
    options = ("--hosts", "spread", "--racks", 2, "--oversubscription", 16, "--bandwidth", "100Gbit")
    status, out, _ = run(capsys, "simulate", path, path, "--share", *options, "--json")
    job = legato.read(path)
    network = {"racks": 2, "oversubscription": 16.0, "bandwidth_bps": 100e9}
    found = legato.share([job, job], hosts="spread", **network)
    assert status == 0 and json.loads(json.dumps(found.rows)) == json.loads(out)["cases"]
    assert "waits for, shared" in str(found) and "longer, of the step alone" in str(found)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"bandwith_bps": 1e9}, "did you mean 'bandwidth_bps'"),
        ({"racks": 1.5}, "racks: 1.5 (expected a whole number)"),
        ({"workers": [1, 2, 3]}, "workers: 3 values for 2 jobs"),
        ({"workers": 0}, "workers: 0 (expected at least 1)"),
        ({"hosts": "here"}, "placement of jobs"),
    ],
)
def test_wrong_arguments_are_named(workload, wrong, words):
    job = legato.read(workload, legato.Workload)
    with pytest.raises(InputError, match=words.replace("(", r"\(").replace(")", r"\)")):
        legato.share([job, job], **wrong)


def test_what_whole_jobs_do_not_have_is_refused(workload):
    job = legato.job("llama-3-8b", data=8)
    with pytest.raises(InputError, match="fabric: does not apply to whole jobs"):
        legato.share([job, job], fabric="ring")
    with pytest.raises(InputError, match="sharing"):
        legato.share([job, job], sharing="fair")
    for jobs in ([job, legato.read(workload, legato.Workload)], []):
        with pytest.raises(InputError, match="expected only one kind"):
            legato.share(jobs)
