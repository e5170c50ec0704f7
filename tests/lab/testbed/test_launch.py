"""How workers are started, heard and ended."""

import os
import signal
import subprocess
import sys
import time

import pytest
from support.rehearsing import needs_hosts, processes_with

from legato.core.errors import RankError
from legato.lab.testbed.launch import run_workers

WORKER = """
import json, os, signal, sys, time
rank = int(os.environ["RANK"])
def tell(done): rank or print(json.dumps({"stage": "work", "done": done, "total": 2}), flush=True)
def log(line): sys.stderr.write(line + "\\n")  # whole: workers share the file, and print() writes in parts
"""
LIVE_ON = WORKER + "tell(1)\nif rank != 1: time.sleep(600)\n"


@pytest.fixture
def worker(tmp_path, monkeypatch):
    """Makes a worker out of a few lines, to be run as `python -m toy_worker`."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return lambda code: (tmp_path / "toy_worker.py").write_text(code)


def run(tmp_path, bandwidth_bps, workers=3):
    told = []
    run_workers(["toy_worker", "a"], workers, tmp_path / "log", lambda *news: told.append(news), bandwidth_bps)
    return told


@pytest.mark.slow
@pytest.mark.parametrize("bandwidth_bps", [None, pytest.param(1e9, marks=needs_hosts)])
def test_progress_is_passed_on_and_the_rest_logged(tmp_path, worker, bandwidth_bps):
    worker(WORKER + "tell(1)\nlog(f'to the log {rank} {sys.argv[1:]}')\n")
    assert run(tmp_path, bandwidth_bps) == [("work", 1, 2)]
    log = (tmp_path / "log").read_text()
    assert all(f"to the log {rank} ['a']" in log for rank in range(3))


@needs_hosts
def test_workers_know_one_another_and_where_records_go(tmp_path, worker, monkeypatch):
    monkeypatch.delenv("LEGATO_FLIGHT_DIR", raising=False)
    names = ["WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "GLOO_SOCKET_IFNAME", "OMP_NUM_THREADS", "LEGATO_FLIGHT_DIR"]
    worker(WORKER + f"log(str(rank) + ' ' + str([os.environ[n] for n in {names}]))\n")
    run(tmp_path, 1e9, workers=2)
    lines = sorted((tmp_path / "log").read_text().splitlines())
    assert lines == [f"{rank} ['2', '0', '10.77.0.1', 'eth0', '1', '{tmp_path}']" for rank in (0, 1)]


@needs_hosts
@pytest.mark.parametrize(
    ("end", "said"),
    [
        ("raise ValueError('of worker 1')", "ValueError: of worker 1"),
        ("os.kill(os.getpid(), signal.SIGKILL)", "worker 1 was ended by SIGKILL"),
        ("sys.exit(3)", "no output"),
    ],
)
def test_when_one_worker_fails_the_others_are_ended(tmp_path, worker, end, said):
    worker(LIVE_ON + f"else: {end}\n")
    with pytest.raises(RankError, match=f"^the workers failed: {said} .*log"):
        run(tmp_path, 1e9)


@needs_hosts
def test_ctrl_c_ends_all(tmp_path, worker):
    worker(WORKER + "os.write(2, b'%d\\n' % os.getpid())\ntell(1)\ntime.sleep(600)\n")  # in one piece
    code = (
        "from pathlib import Path; from legato.lab.testbed.launch import run_workers\n"
        f"run_workers(['toy_worker'], 2, Path({str(tmp_path / 'log')!r}), lambda *n: print(n, flush=True), 1e9)"
    )
    owner = subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a background job's tests ignore it
    )
    with owner:
        assert owner.stdout.readline()
        while len((tmp_path / "log").read_text().split()) < 2:
            time.sleep(0.01)
        os.killpg(owner.pid, signal.SIGINT)
        assert "KeyboardInterrupt" in owner.communicate()[1]
    assert processes_with(str(tmp_path)) == set()
