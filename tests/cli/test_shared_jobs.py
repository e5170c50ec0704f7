"""`legato simulate --share` of whole jobs, as a user meets it."""

import json

import pytest
from support.command import run

import legato

SHARED = ["--share", "--hosts", "spread", "--racks", 2, "--oversubscription", 16]


@pytest.fixture
def jobs(tmp_path, capsys):
    """The files of two jobs, of 32 and 16 GPUs."""
    paths = tmp_path / "a.json", tmp_path / "b.json"
    for path, data in zip(paths, (4, 2), strict=True):
        layout = ["--tensor", 4, "--pipeline", 2, "--data", data, "--microbatches", 4, "--shard", "optimizer"]
        status, _, err = run(capsys, "workload", "llama-3-8b", *layout, "-o", path)
        assert status == 0, err
    return paths


def test_a_row_for_every_job(jobs, capsys):
    status, out, err = run(capsys, "simulate", *jobs, *SHARED)
    assert status == 0, err
    assert "2 jobs on 48 x h100, 2 racks, oversubscription 16:1, spread, by flows" in out
    assert "llama-3-8b 1" in out and "llama-3-8b 2" in out and "all, from 0 s to" in out
    assert "memory of the fullest GPU" in err
    status, out, err = run(capsys, "simulate", *jobs, *SHARED, "--json")
    found = json.loads(out)
    assert status == 0 and not err
    (case,) = found["cases"]
    assert list(case) == ["case", "window_s", "slowdown", "jobs"] and case["slowdown"] > 1.01
    for row, gpus in zip(case["jobs"], (32, 16), strict=True):
        assert row["workers"] == gpus and row["iterations"] >= 3
        assert row["slowdown"] == pytest.approx(row["iteration_s"] / row["alone_s"]) and row["slowdown"] > 1.01
        assert row["shortest_s"] <= row["iteration_s"] <= row["longest_s"]
        assert sum(row["parts"].values()) == pytest.approx(row["iteration_s"])
        assert sum(row["longer_s"].values()) == pytest.approx(row["iteration_s"] - row["alone_s"])
        assert row["longer_s"]["tensor"] == pytest.approx(0, abs=1e-3) and max(row["longer_s"].values()) > 0.01


def test_the_same_file_twice_with_timelines(jobs, tmp_path, capsys):
    status, out, err = run(
        capsys, "simulate", jobs[1], jobs[1], "--share", "--iterations", 2, "--shift", "0,1s", "-o", tmp_path / "t"
    )
    assert status == 0 and out.count("1.000x") == 3 and out.count("nothing") == 2, err
    timelines = [legato.read(tmp_path / "t" / f"job-{number}.json") for number in (1, 2)]
    assert {span.worker // 16 for span in timelines[0].spans} == {0}
    assert {span.worker // 16 for span in timelines[1].spans} == {1}
    status, _, err = run(
        capsys, "report", *(tmp_path / "t" / f"job-{n}.json" for n in (1, 2)), "-o", tmp_path / "r.html"
    )
    assert status == 0, err


def test_a_wrapping_beside_a_job_and_another_wrapping(jobs, tmp_path, capsys):
    """FSDP's program and a job share racks."""
    workload, wrapped = tmp_path / "w.json", tmp_path / "p.json"
    status, _, err = run(capsys, "workload", "llama-3-8b", "-o", workload)
    assert status == 0, err
    plan = ["--shard", "parameters", "--workers", 16, "--machine", "h100", "--program", wrapped]
    status, _, err = run(capsys, "plan", workload, *plan)
    assert status == 0, err
    for other in (jobs[1], wrapped):
        status, out, err = run(capsys, "simulate", wrapped, other, *SHARED, "--json")
        assert status == 0, err
        row = json.loads(out)["cases"][0]["jobs"][0]
        assert row["slowdown"] > 1.01 and row["longer_s"]["data"] > 0
        assert sum(row["longer_s"].values()) == pytest.approx(row["iteration_s"] - row["alone_s"])
    status, out, err = run(capsys, "simulate", wrapped, jobs[1], *SHARED)
    assert status == 0 and "2 jobs on 32 x h100, 2 racks" in out and out.count(" data ") >= 2, err
    status, _, err = run(capsys, "simulate", wrapped, jobs[1], "--share", "-o", tmp_path / "t")
    assert status == 2 and "--output: a program has no timeline" in err and len(err.splitlines()) == 1
    status, _, err = run(capsys, "simulate", wrapped, "--share")
    assert status == 2 and "--share: does not apply to a program" in err
    status, _, err = run(capsys, "simulate", jobs[1], workload, "--share")
    assert status == 2 and "together with whole jobs" in err


def test_a_slow_link_counts_beside_the_other_job_only(jobs, capsys):
    slow = ("--disturb", "link:5:4:0")
    rows = [
        json.loads(run(capsys, "simulate", *jobs, "--share", *options, "--json")[1])["cases"][0]["jobs"]
        for options in ((), slow)
    ]
    assert rows[0][0]["alone_parts"] == rows[1][0]["alone_parts"]
    assert rows[0][0]["slowdown"] == pytest.approx(1) and rows[1][0]["slowdown"] > 1.01
    assert rows[1][1]["slowdown"] == pytest.approx(1)
    status, _, err = run(capsys, "simulate", *jobs, "--share", "--disturb", "link:5:4:0:1us", "--json")
    assert status == 0 and not err
    status, _, err = run(capsys, "simulate", *jobs, "--share", "--disturb", "link:5:4:1000s", "--json")
    assert status == 0 and "shared: link 5 is disturbed only outside the window" in err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--hosts", "together"], "hosts: together (expected packed, spread or random"),
        (["--priority", "2,1"], "--priority: does not apply to a whole job"),
        (["--workers", 8], "--workers: does not apply to a whole job"),
        (["--fabric", "ring"], "--fabric: does not apply to a whole job"),
        (["--fidelity", "formulas"], "--share: does not apply to --fidelity formulas (expected --fidelity flows)"),
        (["--shift", "1s,2s,3s"], "--shift: 3 values for 2 jobs (expected one for all, or one each)"),
        (["--iterations", 2000], "iterations: 2000 (expected 1 to 1,000 steps)"),
        (["--racks", 30], "racks: 30 (expected 1 to the 6 hosts)"),
        (["--gpus-per-host", 5, "--disturb", "compute:48:2:0"], "compute: GPU 48, on which no job has a worker"),
    ],
)
def test_what_is_refused(jobs, capsys, options, message):
    status, _, err = run(capsys, "simulate", *jobs, "--share", *options)
    assert status == 2 and message in err and err.count("\n") == 1


def test_other_machines_and_other_files_are_refused(jobs, workload, tmp_path, capsys):
    layout = ["--data", 8, "--device", "a100"]
    status, _, err = run(capsys, "workload", "llama-3-8b", *layout, "-o", tmp_path / "c.json")
    assert status == 0, err
    for paths, message in (
        ((jobs[0], tmp_path / "c.json"), "job 2, llama-3-8b: card_bytes_per_s"),
        ((jobs[0], workload), "w.json: together with whole jobs"),
    ):
        status, _, err = run(capsys, "simulate", *paths, "--share")
        assert status == 2 and message in err and err.count("\n") == 1
    same = ("--bandwidth", "200Gbit", "--local-bandwidth", "2400Gbit", "--iterations", 1, "--json")
    status, out, err = run(capsys, "simulate", jobs[0], tmp_path / "c.json", "--share", *same)
    assert status == 0 and len(json.loads(out)["cases"][0]["jobs"]) == 2, err
