"""Start worker processes and follow their progress: on loopback with torchrun, or each in its own shaped host."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from typing import IO

from legato.core.errors import RankError
from legato.lab.testbed.hosts import Hosts

__all__ = ["Advance", "run_workers", "tell_progress"]

#: A function that is called with (stage, done, total) when the workers make progress.
Advance = Callable[[str, int, int], None]

_QUIET = {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
_PORT = "29500"

#: An event of the running processes: a line of output, or (k, exit status) of the k-th process.
_Event = str | tuple[int, int]


def run_workers(
    module: Sequence[str], workers: int, log: Path, advance: Advance, bandwidth_bps: float | None = None
) -> None:
    """Run `python -m module...` on every worker, write the output to `log`, and wait until all workers have ended.

    Without a bandwidth, the workers communicate over loopback. With a bandwidth (bits per second),
    each worker runs in a host whose link has this bandwidth. Rank 0 reports progress on
    standard output, one JSON object per line. When a worker fails, all other workers
    are terminated. Raises `RankError` with the error message of the worker that
    failed, and `InputError` if shaped hosts cannot be created on this machine.
    """
    arguments = ["-m", *module]
    with log.open("w") as errors:
        started: AbstractContextManager[list[subprocess.Popen[str]]] = (
            _on_loopback(arguments, workers, errors)
            if bandwidth_bps is None
            else _in_hosts(arguments, workers, errors, bandwidth_bps)
        )
        with started as processes:
            failed, status = _follow(processes, advance)
    if status != 0:
        who = "torchrun" if bandwidth_bps is None else f"worker {failed}"
        end = f"{who} was ended by {signal.Signals(-status).name}" if status < 0 else _error_line(log)
        raise RankError(f"the workers failed: {end} (full log: {log})")


def tell_progress(rank: int) -> Advance:
    """Return a function that reports a worker's progress to `run_workers`; it prints only on rank 0."""

    def tell(stage: str, done: int, total: int) -> None:
        if rank == 0:
            print(json.dumps({"stage": stage, "done": done, "total": total}), flush=True)

    return tell


@contextmanager
def _on_loopback(arguments: Sequence[str], workers: int, log: IO[str]) -> Iterator[list[subprocess.Popen[str]]]:
    """Start torchrun, which starts and monitors the workers, and yield its process."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={workers}"]
    job = subprocess.Popen(
        [*torchrun, *arguments], stdout=subprocess.PIPE, stderr=log, text=True, env={**os.environ, **_QUIET}
    )
    try:
        yield [job]
    finally:
        job.terminate()
        job.wait()


@contextmanager
def _in_hosts(
    arguments: Sequence[str], workers: int, log: IO[str], bandwidth_bps: float
) -> Iterator[list[subprocess.Popen[str]]]:
    """Start one process per worker, each in its own host; on exit, end the processes and remove the hosts."""
    with Hosts(workers, bandwidth_bps) as hosts:
        shared = {
            # Process ids start again in these hosts, and they name the records.
            "LEGATO_FLIGHT_DIR": str(Path(log.name).parent),
            **os.environ,
            **_QUIET,
            "WORLD_SIZE": str(workers),
            "LOCAL_RANK": "0",
            "LOCAL_WORLD_SIZE": "1",
            "MASTER_ADDR": hosts.address(0),
            "MASTER_PORT": _PORT,
            "GLOO_SOCKET_IFNAME": hosts.interface,
        }
        yield [
            hosts.popen(
                rank,
                [sys.executable, *arguments],
                env={**shared, "RANK": str(rank)},
                stdout=subprocess.PIPE if rank == 0 else log,
                stderr=log,
                text=True,
            )
            for rank in range(workers)
        ]


def _follow(processes: Sequence[subprocess.Popen[str]], advance: Advance) -> tuple[int, int]:
    """Pass on the progress of process 0; return (k, exit status) for the first process k to fail, or else (0, 0)."""
    events: SimpleQueue[_Event] = SimpleQueue()
    readers = [Thread(target=_report, args=(k, process, events), daemon=True) for k, process in enumerate(processes)]
    for reader in readers:
        reader.start()
    running = len(processes)
    while running:
        match events.get():
            case (k, status):
                running -= 1
                if status != 0:
                    return k, status
            case str(line) if line.startswith('{"stage"'):
                progress = json.loads(line)
                advance(progress["stage"], progress["done"], progress["total"])
    return 0, 0


def _report(k: int, process: subprocess.Popen[str], events: SimpleQueue[_Event]) -> None:
    """Put each line that process k prints into `events`; when the process ends, put (k, exit status)."""
    with process:
        for line in process.stdout or ():
            events.put(line)
    events.put((k, process.returncode))


def _error_line(log: Path) -> str:
    """Return the line of a log that most likely names the error."""
    text = log.read_text(errors="replace")
    errors = re.findall(r"^(?:\[rank\d+\]: )?((?:[\w.]+\.)?\w+(?:Error|Exception|Interrupt)\b.*)", text, re.MULTILINE)
    return errors[0] if errors else (text.strip().splitlines() or ["no output"])[-1]
