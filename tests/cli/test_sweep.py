"""`legato sweep`: what it prints and writes, how it refuses, and what Ctrl-C leaves."""

import contextlib
import csv
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from distributed import LocalCluster
from support import PATIENCE_S, unmeasured
from support.command import run, without_progress

import legato

GRID = ("--bandwidth", "500Mbit,1,10Gbit", "--workers", "2,4", "--fabric", "ring,parameter-server", "--jobs", 1)


def rows_of(path):
    return list(csv.DictReader(path.read_text().splitlines()))


def test_a_grid_by_hand(capsys, workload):
    """A ring of two: each half of both tensors crosses a link twice, after 20 ms, and 10 ms of forward pass follow."""
    status, out, _ = run(capsys, "sweep", workload, *GRID, "--latency", 0, "--json")
    rows = json.loads(out)
    assert status == 0 and len(rows) == 12
    assert [row["bandwidth_bps"] for row in rows[:6:2]] == [5e8, 1e9, 1e10]
    ring = [row for row in rows if row["fabric"] == "ring" and row["workers"] == 2]
    for row in ring:
        assert row["iteration_s"] == pytest.approx(0.02 + 5_000_000 * 8 / row["bandwidth_bps"] + 0.01)
        assert row["speedup"] == 1


@pytest.mark.parametrize("suffix", ["csv", "parquet"])
def test_it_writes_rows_and_a_report_and_goes_on_from_there(capsys, workload, tmp_path, suffix):
    output, report = tmp_path / f"s.{suffix}", tmp_path / "s.html"
    status, out, err = run(capsys, "sweep", workload, *GRID, "-o", output, "--report", report)
    assert status == 0 and "12 rows" in err and "parameter-server" in out
    assert "speedup over ring" in out
    rows = pq.read_table(output).to_pylist() if suffix == "parquet" else rows_of(output)
    assert len(rows) == 12 and "<html" in report.read_text()
    before = output.with_name(f"s.{suffix}.cells.jsonl").read_bytes()
    _, _, err = run(capsys, "sweep", workload, *GRID, "-o", output)
    assert "12 finished cells" in err and output.with_name(f"s.{suffix}.cells.jsonl").read_bytes() == before
    _, _, err = run(capsys, "sweep", workload, *GRID, "-o", output, "--fresh")
    assert "finished cells" not in err


def test_a_mix_of_jobs_on_several_networks_is_what_simulate_says_of_each(capsys, workload, tmp_path):
    """Spread over two racks, whose links above are as fast as the hosts', half as fast, and a quarter."""
    mix = (workload, workload, "--share", "--workers", "4,2", "--fabric", "ring", "--hosts", "spread", "--racks", 2)
    more = ("--iterations", 5, "--spines", 1, "--oversubscription")
    status, out, _ = run(capsys, "sweep", *mix, *more, "1,2,4", "--json")
    found = json.loads(out)
    assert status == 0 and [row["oversubscription"] for row in found] == [1, 2, 4]
    for row in found:
        (case,) = json.loads(run(capsys, "simulate", *mix, *more, row["oversubscription"], "--json")[1])["cases"]
        assert row["jobs"] == case["jobs"] and row["slowdown"] == case["slowdown"]
    assert len({row["utilization"] for row in found}) == 3
    status, out, _ = run(capsys, "sweep", *mix, *more, "2,4")
    assert status == 0 and "2 jobs on 2 networks" in out and "2:1" in out and "4:1" in out and "computing" in out
    rows, page = tmp_path / "rows.csv", tmp_path / "page.html"
    status, _, _ = run(capsys, "sweep", *mix, *more, "1,2", "-o", rows)
    lines = rows.read_text().splitlines()
    assert status == 0 and len(lines) == 5 and "iteration_s" in lines[0]
    status, out, err = run(capsys, "sweep", *mix, *more, "1,2,4", "-o", rows, "--report", page, "--json")
    assert status == 0 and "2 finished cells" in err and json.loads(out) == found
    assert "2 jobs on 3 networks" in page.read_text()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--share", "-o", "x.parquet"), "--output x.parquet: .parquet (expected .csv, .html"),
        (("--share", "--racks", "1,99"), "racks: 99 (expected 1 to the 16 workers)"),
        (("--share", "--servers", 2), "--servers: does not apply to jobs that share networks"),
        (("--share", "--workers", "1,2,3"), "3 values for 2 jobs"),
        (("--share", "--fabric", "all"), "'all' (expected, with --share, one fabric for all jobs, or one each)"),
        (("--share", "--fidelity", "formulas"), "does not apply to --fidelity formulas"),
        (("--hosts", "spread"), "--hosts: does not apply to one job (expected --share)"),
    ],
)
def test_a_mix_that_makes_no_sense_gets_one_line(capsys, workload, options, words):
    status, _, err = run(capsys, "sweep", workload, workload, *options)
    assert status == 2 and words in err and len(err.splitlines()) == 1


def test_disturbances_are_an_axis(capsys, workload, tmp_path):
    """5 MB in a ring of 4 take 6 ms on 10 Gbit/s after 20 ms of the backward pass; link 3 fails then for 1 ms."""
    output, report = tmp_path / "s.csv", tmp_path / "s.html"
    command = (workload, "--workers", 4, "--latency", 0, "--bandwidth", "10,20Gbit", "--jobs", 1, "-o", output)
    assert run(capsys, "sweep", *command)[0] == 0
    fails = ("--disturb", "none", "--disturb", "link:3:fails:22ms:23ms")
    status, out, err = run(capsys, "sweep", *command, *fails, "--report", report)
    assert status == 0 and "link:3:fails:22ms:23ms" in out and "link:3:fails:22ms:23ms" in report.read_text()
    rows = rows_of(output)
    assert [row["disturb"] for row in rows] == ["none", "none", *["link:3:fails:22ms:23ms"] * 2]
    quiet, broken = ([float(row["iteration_s"]) for row in rows[i : i + 2]] for i in (0, 2))
    assert broken == pytest.approx([seconds + 1e-3 for seconds in quiet])
    before = output.with_name("s.csv.cells.jsonl").read_bytes()
    _, _, err = run(capsys, "sweep", *command, *fails)
    assert "finished cells" in err and output.with_name("s.csv.cells.jsonl").read_bytes() == before


def test_an_output_that_is_a_directory_is_refused_before_any_work(capsys, workload, tmp_path):
    output = tmp_path / "s.csv"
    output.mkdir()
    status, out, err = run(capsys, "sweep", workload, "-o", output)
    assert status == 2 and out == "" and len(err.strip().splitlines()) == 1 and "a directory (expected a file)" in err
    assert [path.name for path in tmp_path.iterdir() if "cells" in path.name] == []


def test_the_title_says_what_no_column_does(capsys, workload):
    """What is the same in all cells, in the words of the options, unless it is as usual."""

    def title(*arguments):
        status, out, err = run(capsys, "sweep", workload, "--jobs", 1, *arguments)
        assert status == 0, err
        return out.splitlines()[0]

    usual = ", 5 us a send, 1 message in flight"
    assert title() == f"1 cell, toy, 8 workers, 10 Gbit/s, latency 30 us, ring{usual}"
    hosts = ("--gpus-per-host", 4, "--gpus-per-card", 2, "--local-bandwidth", "1Tbit", "--reduce", "50us")
    racks = ("--racks", 2, "--spines", 2, "--oversubscription", 2, "--balance", "spray", "--scheduler", "ddp")
    assert title("--bandwidth", "1,10Gbit", *hosts, *racks) == (
        "2 cells, toy, 8 workers, latency 30 us, 4 GPUs per host, 1 Tbit/s inside hosts, 2 racks, 2 spines, "
        "oversubscription 2:1, ring, ddp, 5 us a send, 2 GPUs per card, spray, reduction 50 us per MiB, "
        "1 message in flight"
    )
    slow = ("--jitter", "0.1", "--disturb", "link:0:2:0", "--sharing", "fair")
    assert title(*slow) == (
        "1 cell, toy, 8 workers, 10 Gbit/s, latency 30 us, jitter 0.1, "
        "disturbed link:0:2:0, ring, 5 us a send, fair sharing, 1 message in flight"
    )
    assert title("--in-flight", "any").endswith("ring, 5 us a send, any number of messages in flight")
    assert title("--in-flight", 2, "--send", "2us").endswith("ring, 2 us a send, 2 messages in flight")
    assert title("--latency", "1us,1ms").endswith("ring, 5 us a send, or the latency, 1 message in flight")
    assert title("--latency", 0, "--fabric", "multicast").endswith("latency 0 s, multicast")
    assert title("--fidelity", "formulas").endswith("ring, 5 us a send, by formulas")


def test_what_failed_is_said(capsys, workload):
    status, out, err = run(capsys, "sweep", workload, "--scheduler", "plain,tac", "--jobs", 1)
    assert status == 0 and "failed" in out
    assert "1 failed (tac on ring): 0 parameter servers" in err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--bandwidth", "1,x"), "--bandwidth: 'x' is not a bandwidth"),
        (("--bandwidth", "1,2"), "'2' is not a bandwidth"),
        (("--workers", "4,,8"), "--workers '4,,8': ''"),
        (("--workers", "-1"), "--workers '-1'"),
        (("--workers", "4x"), "--workers '4x'"),
        (("--jitter", "1,x"), "--jitter '1,x': 'x'"),
        (("--bandwidth", "1e-300bit"), "not a bandwidth of"),
        (("--latency", "1e300s"), "not a time of at most"),
        (("--racks", "99"), "racks: 99"),
        (("--oversubscription", "0"), "oversubscription: 0"),
        (("--jitter", "inf"), "jitter: inf"),
        (("--disturb", "link:7"), "disturb: 'link:7' (expected something like link:7:4:10ms:30ms)"),
        (("--disturb", "link:8:2:0"), "link: 8 (expected 0 to 7)"),
        (("--disturb", "none", "--disturb", "link:1:2:0", "--iterations", 2), "iterations: 2 (expected 1 with disturb"),
        (("--sharing", "unfair"), "sharing"),
        (("--placement", "equal"), "placement: ring has no such option"),
        (("--iterations", "0"), "iterations: 0"),
        (("--server-bandwidth", "0"), "--server-bandwidth: '0' is not a bandwidth"),
        (("--fidelity", "formulas", "--racks", "2"), "identical hosts"),
        (("--fabric", "rings"), "did you mean 'ring'"),
        (("--fidelity", "packet"), "'--fidelity': 'packet' is not one of 'formulas', 'transfers', 'flows'"),
        (("--scheduler", ""), "unknown scheduler ''"),
        (("-o", "x.xlsx"), "expected .parquet, .csv, .html"),
        (("-o", "/no/such/x.csv"), "no such directory"),
        (("--report", "x.csv"), "expected .html"),
        (("--dask", "127.0.0.1:1"), "dask: no scheduler answers at '127.0.0.1:1'"),
        (("--dask", "nowhere"), "dask: 'nowhere' (expected the scheduler's HOST:PORT)"),
        (("--dask", "spark://x"), "dask: 'spark://x' (expected the scheduler's HOST:PORT)"),
    ],
)
def test_wrong_input_gets_one_line(capsys, monkeypatch, workload, arguments, words):
    monkeypatch.setattr("legato.sweeps.parallel._CONNECT_S", 0.5)
    status, out, err = run(capsys, "sweep", workload, *arguments)
    assert (status, out) == (2, "")
    assert len(err.strip().splitlines()) == 1 and words in err


@pytest.fixture(scope="module")
def dask():
    """The address of the scheduler of a cluster with two worker processes."""
    with LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=":0") as cluster:
        yield cluster.scheduler_address


@pytest.mark.parametrize(("finished", "on"), [(0, "this machine"), (3, "this machine"), (3, "dask")])
def test_ctrl_c_ends_it_in_one_line_and_keeps_what_is_finished(tmp_path, dask, finished, on):
    ops = [legato.Op(f"f{i}", "forward", 1e-4) for i in range(200)]
    ops += [legato.Op(f"b{i}", "backward", 1e-4, (i,)) for i in range(200)]
    tensors = [legato.Tensor(f"w{i}", 10_000, 200 + i, (i,)) for i in range(200)]
    legato.write(tmp_path / "w.json", legato.Workload("chain", tuple(ops), tuple(tensors)))
    workers = [str(n) for n in range(2, 1200)]  # far more cells than can be finished before Ctrl-C
    command = [
        sys.executable,
        "-m",
        "legato",
        "sweep",
        "w.json",
        "--fabric",
        "parameter-server,tree",
        *(("--dask", dask) if on == "dask" else ("--jobs", "2")),
    ]
    command += ["--workers", ",".join(workers), "-o", "s.csv"]
    sweep = subprocess.Popen(
        command,
        cwd=tmp_path,
        start_new_session=True,
        stderr=subprocess.PIPE,
        text=True,
        env=unmeasured(),
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a background job's tests ignore it
    )
    kept = tmp_path / "s.csv.cells.jsonl"
    while sweep.poll() is None and not (kept.exists() and kept.read_bytes().count(b"\n") > finished):
        time.sleep(0.05)
    os.killpg(sweep.pid, signal.SIGINT)  # as a terminal does: the workers too
    _, err = sweep.communicate(timeout=PATIENCE_S)
    lines = kept.read_bytes().splitlines()
    err = without_progress(err)
    assert sweep.returncode == 130 and len(err.splitlines()) == 1
    assert "finished cells are kept in s.csv.cells.jsonl" in err
    assert finished < len(lines) < 2 * len(workers) and not (tmp_path / "s.csv").exists()
    assert all(json.loads(line) for line in lines)
    deadline = time.monotonic() + PATIENCE_S  # joblib's resource tracker ends a moment after its parent
    while _in_session(sweep.pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not _in_session(sweep.pid)


def _in_session(leader):
    """Commands of the processes in the session that `leader` began."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            state, _, _, session, *_ = (folder / "stat").read_text().rpartition(")")[2].split()
            if int(session) == leader and state != "Z":
                found.append((folder / "cmdline").read_bytes())
    return found
