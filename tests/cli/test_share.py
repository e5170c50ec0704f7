"""`legato simulate --share` as a user meets it."""

import json

import pytest
from support.command import run

import legato

KEYS = ["job", "workers", "priority", "shift_s", "alone_s", "iteration_s", "slowdown", "shortest_s", "longest_s"]
KEYS += ["iterations", "utilization"]
#: Two workers on the same two hosts; in a ring, 5 MB take 40 ms on 1 Gbit/s, after 20 ms of the backward pass.
TWO = ("--share", "--fabric", "ring", "--hosts", "together", "--workers", 2, "--bandwidth", "1Gbit", "--latency", 0)


def shared(capsys, *arguments):
    status, out, err = run(capsys, "simulate", *arguments, "--json")
    assert status == 0, err
    return json.loads(out)


@pytest.fixture
def other(tmp_path):
    path = tmp_path / "other.json"
    ops = [legato.Op("f", "forward", 0.04), legato.Op("b", "backward", 0.02, (0,))]
    legato.write(path, legato.Workload("other", tuple(ops), (legato.Tensor("w", 1_250_000, 1, (0,)),)))
    return path


def test_a_row_for_every_job(capsys, workload, other):
    found = shared(capsys, workload, other, *TWO)
    assert [case["case"] for case in found["cases"]] == ["equal"]
    (case,) = found["cases"]
    assert [list(job) for job in case["jobs"]] == [KEYS, KEYS]
    first, second = case["jobs"]
    assert (first["job"], second["job"]) == ("toy", "other") and first["workers"] == second["workers"] == 2
    assert first["alone_s"] == pytest.approx(0.07) and second["alone_s"] == pytest.approx(0.07)
    for job in case["jobs"]:
        assert job["slowdown"] == pytest.approx(job["iteration_s"] / job["alone_s"]) and job["slowdown"] >= 1
        assert job["shortest_s"] <= job["iteration_s"] <= job["longest_s"]
    begin, end = case["window_s"]
    assert 0 < begin < end and first["iterations"] >= 20
    assert case["slowdown"] == pytest.approx((first["slowdown"] + second["slowdown"]) / 2)


def test_jobs_on_hosts_of_their_own_behind_a_switch_are_alone(capsys, workload):
    options = ("--share", "--fabric", "ring,tree", "--workers", "3,2")
    status, out, _ = run(capsys, "simulate", workload, workload, *options)
    assert status == 0 and "2 jobs on 5 hosts, 10 Gbit/s, latency 30 us, 5 us a send, packed" in out
    assert out.count("1.000x") == 3 and "toy 1" in out and "toy 2" in out and "all, from" in out
    found = shared(capsys, workload, workload, *options, "--racks", 2, "--oversubscription", 4, "--hosts", "spread")
    assert found["cases"][0]["slowdown"] > 1


def test_disturbed_cases_are_beside_the_same_ones_undisturbed(capsys, workload, other):
    jobs = (workload, other, *TWO, "--priority", "2,1")
    plain = shared(capsys, *jobs)["cases"]
    found = shared(capsys, *jobs, "--disturb", "link:1:2:0")["cases"]
    names = ["equal", "given"]
    assert [case["case"] for case in found] == [*names, *(f"{name}, undisturbed" for name in names)]
    assert [case | {"case": name} for case, name in zip(found[2:], names, strict=True)] == plain
    for slow, quiet in zip(found, plain, strict=False):
        assert slow["slowdown"] > quiet["slowdown"]
        assert [job["alone_s"] for job in slow["jobs"]] == pytest.approx([job["alone_s"] for job in quiet["jobs"]])


def test_a_disturbance_outside_of_the_window_is_named(capsys, workload, other):
    _, _, err = run(capsys, "simulate", workload, other, *TWO, "--disturb", "link:1:2:0:10ms, compute:0:2:1s:1100ms")
    assert len(err.strip().splitlines()) == 1 and "equal: link 1 is disturbed only outside the window" in err


LAYOUTS = {
    "ecmp": ("--racks", 2, "--spines", 2, "--oversubscription", 2, "--hosts", "spread"),
    "fat tree": ("--topology", "fat-tree", "--hosts", "random"),
    "rails": ("--topology", "rails", "--gpus-per-host", 4, "--spines", 0),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_networks_above_one_switch(capsys, workload, layout):
    """The title says which. Jobs meet above the leaves, so not on rails without spines."""
    options = ("--fabric", "shuffle", "--workers", 8, "--bandwidth", "1Gbit", *LAYOUTS[layout])
    status, out, err = run(capsys, "simulate", workload, workload, "--share", *options)
    network = "1 Gbit/s, latency 30 us, 5 us a send"
    words = {
        "ecmp": f"16 hosts, {network}, 2 racks, 2 spines, 2:1, ecmp, spread, ",
        "fat tree": f"16 hosts, {network}, fat-tree (4 ports), ecmp, random, ",
        "rails": f"4 hosts, {network}, 4 GPUs (100 Gbit/s) and 4 cards a host, rails, 0 spines, packed, ",
    }
    said = f"2 jobs on {words[layout]}by transfers, 1 message in flight"
    assert status == 0 and said in " ".join(out.split()), (out, err)
    (case,) = shared(capsys, workload, workload, "--share", *options)["cases"]
    assert (case["slowdown"] == 1.0) == (layout == "rails")  # hosts and their cards are of one job each


def test_hosts_that_are_not_full_are_there(capsys, workload):
    """Three jobs of three workers are on three hosts of four GPUs."""
    options = ("--share", "--fabric", "ring", "--workers", 3, "--gpus-per-host", 4)
    status, out, _ = run(capsys, "simulate", workload, workload, workload, *options)
    assert status == 0 and "3 jobs on 3 hosts" in out


@pytest.mark.parametrize(
    "slower, refused",
    [
        (
            ("--disturb", "compute:7:2:0"),
            "GPU 7, on which no job has a worker (expected one of the 6 with a worker, of 8)",
        ),
        (("--disturb", "link:6:2:0", "--gpus-per-card", 2), "link: GPU 6, on which"),
        (("--disturb", "link:7:2:0", "--gpus-per-card", 4), None),
        (("--disturb", "link:7:2:0", "--topology", "rails", "--spines", 0), None),
        (("--disturb", "compute:5:2:0,compute:6:2:0"), "compute: GPU 6, on which"),
        (("--disturb", "compute:5:2:0"), None),
        (("--disturb", "link:6:2:0"), "link: GPU 6, on which"),
    ],
)
def test_what_is_slower_is_a_gpu_with_a_worker(capsys, workload, slower, refused):
    """Two jobs of three workers are on the first six GPUs of two hosts. A card with a worker may have GPUs without."""
    options = ("--share", "--fabric", "ring", "--workers", 3, "--gpus-per-host", 4, "--bandwidth", "1Gbit")
    status, _, err = run(capsys, "simulate", workload, workload, *options, *slower)
    assert status == (0 if refused is None else 2), err
    assert refused is None or (refused in err and len(err.strip().splitlines()) == 1)


def test_priorities_beside_equal_ones(capsys, workload, other):
    found = shared(capsys, workload, other, *TWO, "--priority", "2,1", "--sharing", "fair")
    cases = {case["case"]: case["jobs"] for case in found["cases"]}
    assert list(cases) == ["equal", "given"]
    priorities = [[job["priority"] for job in jobs] for jobs in cases.values()]
    assert priorities == [[0, 0], [2, 1]]
    assert cases["given"][0]["slowdown"] == pytest.approx(1)


def test_plans_and_schedulers_are_of_one_job_each(capsys, workload, other, tmp_path):
    paths = []
    for number, path in enumerate((workload, other)):
        job = legato.read(path, legato.Workload)
        whole = tuple(legato.Slice(t.name, 0, t.nbytes) for t in job.tensors)
        paths.append(tmp_path / f"p{number}.json")
        legato.write(paths[-1], legato.Plan("one", (legato.Message(whole),)))
    given = shared(capsys, workload, other, *TWO, "--plan", ",".join(map(str, paths)))
    planned = shared(capsys, workload, other, *TWO, "--scheduler", "single")
    mixed = shared(capsys, workload, other, *TWO, "--scheduler", "single,plain")
    assert given == planned and mixed["cases"][0]["jobs"] != shared(capsys, workload, other, *TWO)["cases"][0]["jobs"]


def test_a_plan_that_means_something_by_formulas_only(capsys, workload, tmp_path):
    plan = tmp_path / "p.json"
    job = legato.read(workload, legato.Workload)
    whole = tuple(legato.Slice(t.name, 0, t.nbytes) for t in job.tensors)
    legato.write(plan, legato.Plan("one", (legato.Message(whole, wire="bf16"),)))
    options = ("--share", "--fabric", "ring", "--workers", 2, "--plan", plan)
    status, out, err = run(capsys, "simulate", workload, workload, *options)
    assert status == 2 and out == "" and "wire: a plan with wire formats transfer by transfer" in err


def test_timelines_that_the_report_draws(capsys, workload, other, tmp_path):
    folder, report = tmp_path / "jobs", tmp_path / "r.html"
    status, _, err = run(capsys, "simulate", workload, other, *TWO, "-o", folder)
    assert status == 0 and f"(legato report {folder}/job-1.json {folder}/job-2.json shows them)" in err
    found = [legato.read(folder / f"job-{number}.json", legato.Timeline) for number in (1, 2)]
    assert [timeline.name for timeline in found] == ["toy", "other"]
    assert all(timeline.spans for timeline in found)
    assert run(capsys, "report", *sorted(folder.iterdir()), "-o", report)[0] == 0
    page = report.read_text().partition("<script")[0]
    assert "<h3>2 jobs on one network, predicted</h3>" in page and "All jobs from the same moment" in page
    assert "Schedulers" not in page and "as fast" not in page and " under " not in page and "start of the" not in page
    assert "other" in report.read_text()


def test_timelines_do_not_overwrite_what_is_read(capsys, workload, other, tmp_path):
    folder = tmp_path / "jobs"
    folder.mkdir()
    for number, path in enumerate((workload, other), 1):
        (folder / f"job-{number}.json").write_bytes(path.read_bytes())
    mine, plan = folder / "job-2.json", folder / "job-1.json"
    for arguments in ((workload, mine), (mine, workload), (workload, other, "--plan", f"{plan}, {plan}")):
        status, out, err = run(capsys, "simulate", *arguments, *TWO, "-o", folder)
        assert status == 2 and out == "" and "would overwrite an input file" in err, arguments
    assert mine.read_bytes() == other.read_bytes() and plan.read_bytes() == workload.read_bytes()
    assert run(capsys, "simulate", mine, *TWO, "-o", folder)[0] == 0  # of one job, job-1.json alone is written


@pytest.mark.parametrize(
    "options, words",
    [
        (("--shift", "1ms"), "--shift: does not apply to one job (expected --share)"),
        (("--hosts", "spread"), "--hosts: does not apply to one job"),
        (("--workers", "2,3"), "--workers: 2 values for 1 job"),
        (("--share",), "--fabric: 'all' (expected, with --share, one fabric"),
        (("--share", "--fabric", "ring,tree,ring"), "--fabric: 3 values for 2 jobs"),
        (("--share", "--fabric", "ring", "--workers", "2,x"), "--workers: 'x' is not a whole number"),
        (("--share", "--fabric", "ring", "--workers", "0"), "workers: 0"),
        (("--share", "--fabric", "ring", "--workers", "4,-1"), "workers: -1 (expected at least 1)"),
        (("--share", "--fabric", "ring", "--workers", "1048576,8"), "workers: 1048584 (expected 1 to 1048576)"),
        (("--share", "--fabric", "rinf"), "did you mean 'ring'"),
        (("--share", "--fabric", "ring", "--shift", "1"), "'1' is not a time"),
        (("--share", "--fabric", "ring", "--disturb", "link:16:2:0"), "link: 16 (expected 0 to 15)"),
        (("--share", "--fabric", "ring", "--disturb", "server:0:2:0"), "server: 0 (there is no server)"),
        (("--share", "--fabric", "ring", "--priority", "high"), "--priority: 'high' is not a whole number"),
        (("--share", "--fabric", "ring", "--iterations", "2"), "iterations: 2 (expected 4 to 1000)"),
        (("--share", "--fabric", "ring", "--fidelity", "formulas"), "expected --fidelity transfers"),
        (("--share", "--fabric", "ring", "--workers", "5000"), "more than 20,000,000"),
        (("--share", "--fabric", "hierarchical"), "hierarchical on a shared network (expected gpus_per_host above 1)"),
        (
            ("--share", "--fabric", "hierarchical", "--workers", 6, "--gpus-per-host", 4),
            "hierarchical on parts of hosts",
        ),
        (("--share", "--fabric", "ring", "--gpus-per-host", 0), "gpus_per_host: 0"),
        (("--share", "--fabric", "ring", "--topology", "rails"), "rails for hosts of 1 on one card"),
    ],
)
def test_wrong_input_is_one_line(capsys, workload, options, words):
    status, out, err = run(capsys, "simulate", workload, workload, *options)
    assert status == 2 and out == "" and words in err and len(err.strip().splitlines()) == 1, err
