"""Ranks that die, stop, raise, sleep or go astray: every other rank ends in time, names it, and leaves a record."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from support import PATIENCE_S, environment, faults

pytestmark = pytest.mark.slow

#: What every rank that legato ends has to say.
CASES = {
    "killed": "rank 1 does not answer (killed, stopped or cut off)",
    "stopped": "rank 1 does not answer (killed, stopped or cut off)",
    "killed_rank_0": "the store is gone, and with it rank 0",
    "killed_with_buffers": "rank 1 does not answer (killed, stopped or cut off)",
    "raises_in_forward_with_buffers": "rank 1 ended with ValueError: not today (at faults.py:",
    "killed_while_observed": "rank 1 does not answer (killed, stopped or cut off)",
    "killed_before_distribute": "rank 1 has not called what this rank has (legato.distribute()?)",
    "killed_in_a_tournament": "rank 1 does not answer (killed, stopped or cut off)",
    "raises_in_forward": "rank 1 ended with ValueError: not today (at faults.py:",
    "raises_in_backward": "rank 1 ended with ValueError: not today (at faults.py:",
    "raises_in_the_loader": "rank 1 ended with ValueError: no such file (at faults.py:",
    "sleeps_in_the_loader": "rank 1 is between backward passes, 5 done (at faults.py:",
    "exits": "rank 1 ended with exit status 3",
    "skips_a_step": "rank 1 ended, without an error",
    "skips_a_step_in_debug_mode": (
        "rank 1 sends message 0 (first.weight +2) of backward pass 6, 2444 bytes, after 7 forward passes, where "
        "rank 0 sends message 0 (first.weight +2) of backward pass 6, 2444 bytes, after 6 forward passes"
    ),
    "nan_in_debug_mode": "rank 1: the gradient of third.weight is not finite, message 0 (first.weight +2)",
}


#: What fails first here is not legato's: DDP's own broadcast of buffers, its passes, or the first call of all.
ELSEWHERE = (
    "killed_with_buffers", "raises_in_forward_with_buffers", "killed_while_observed", "killed_before_distribute",
)  # fmt: skip


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    """(exit status, seconds, output, flight records) of every rank of every case."""
    root = tmp_path_factory.mktemp("faults")
    command = [sys.executable, "-m", "support.faults", str(root), "ctrl_c", "gathers_a_sharded_state_alone", *CASES]
    subprocess.run(command, env=environment(), check=True, timeout=2 * PATIENCE_S)

    def of(case):
        found = []
        for rank in range(faults.RANKS):
            ended = json.loads((root / case / f"{rank}.json").read_text())
            text = (root / case / f"{rank}.txt").read_text()
            records = list((root / case).glob(f"legato-flight-rank{rank}-*.jsonl"))
            found.append((ended["status"], ended["seconds"], text, records))
        return found

    return of


@pytest.mark.parametrize("case", CASES)
def test_every_other_rank_ends_and_names_the_culprit(outcomes, case):
    culprit = 0 if case == "killed_rank_0" else 1
    for rank, (status, seconds, text, records) in enumerate(outcomes(case)):
        assert seconds < PATIENCE_S, f"rank {rank} hangs"
        if rank == culprit and not case.endswith("debug_mode"):
            continue
        assert status == 1
        said = next(line for line in reversed(text.splitlines()) if "RankError: " in line or "legato: rank" in line)
        said = said.replace("ranks 1, 2 have", "rank 1 has")  # who is late on a busy machine is missing, too
        said = said.replace("ranks 0, 1 have", "rank 1 has")
        assert f"rank {rank}: " in said and CASES[case] in said
        if case != "killed_before_distribute":
            assert str(records[0]) in said
        if case not in ELSEWHERE:
            doing = ["message 0 (first.weight +2) of backward pass", "comparing times"]  # as it was faster or slower
            assert any(what in said for what in doing[: 1 + ("tournament" in case)])


def test_a_rank_that_gathers_a_state_alone_ends_like_the_others(outcomes):
    for rank, (status, seconds, text, records) in enumerate(outcomes("gathers_a_sharded_state_alone")):
        assert status in (1, -6) and seconds < PATIENCE_S  # -6 where a thread still waits for another rank
        said = next(line for line in reversed(text.splitlines()) if "RankError: " in line)
        assert "rank 1 waits in state_dict() of a sharded optimizer, which all ranks have to call" in said
        doing = (
            "gathering the state of a sharded optimizer: " if rank == 1 else "message 0 (first.weight +2) of backward"
        )
        assert f"rank {rank}: {doing}" in said and "failed as well" in said and str(records[0]) in said


def test_ctrl_c_reaches_a_rank_that_waits(outcomes):
    for rank, (status, seconds, text, records) in enumerate(outcomes("ctrl_c")):
        assert status == -2 and seconds < PATIENCE_S and "KeyboardInterrupt" in text
        if rank != 1:
            assert f"rank {rank} was waiting for the other ranks; the last messages are in {records[0]}" in text


def test_the_flight_record_tells_the_last_messages(outcomes):
    _, _, _, (record,) = outcomes("killed")[0]
    failure, *events = map(json.loads, Path(record).read_text().splitlines())
    assert failure["rank"] == 0 and "message 0 (first.weight +2) of backward pass" in failure["failure"]
    assert [e["event"] for e in events[:2]] == ["backward begins", "message goes out"]
    passes = [e["pass"] for e in events]
    assert passes == sorted(passes) and passes[-1] in (5, 6)
    went = [(e["pass"], e["message"]) for e in events if e["event"] == "message goes out"]
    came = [(e["pass"], e["message"]) for e in events if e["event"] == "message came in"]
    assert went == sorted(went) and set(came) < set(went)


_BUSY = """
import os, sys, threading, types
import torch.distributed as dist
from legato.pytorch.network import watchdog

children = []  # each ends as a process does that imported torch itself
while len(children) < 6:
    child = os.fork()
    if not child:
        break
    children.append(child)
else:
    sys.exit(any([os.waitpid(child, 0)[1] for child in children]))
watchdog.POLL_S, looks = 0.0, threading.Semaphore(0)
look = watchdog._Watch._look
watchdog._Watch._look = lambda watch: (looks.release(), look(watch))[1]
dist.init_process_group("gloo", store=dist.TCPStore("127.0.0.1", 0, 1, True), rank=0, world_size=1)
group = types.SimpleNamespace(rank=lambda: 0, size=lambda: 2, name=lambda: "gloo", group_name="busy")
dogs = [watchdog.Watchdog(group, watchdog.FlightRecorder(0), str, group.group_name) for _ in range(4)]
for _ in range(400):
    looks.acquire()
"""


def test_a_process_ends_while_its_watchdogs_are_in_the_store():
    """Python ends a thread that comes back from the store then, which aborts the process."""
    done = subprocess.run([sys.executable, "-c", _BUSY], capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stderr
