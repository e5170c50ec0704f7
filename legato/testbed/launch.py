"""Starts workers and listens to them: on loopback by torchrun, or each in a shaped host of its own."""

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
from legato.testbed.hosts import Hosts

__all__ = ["Advance", "run_workers", "tell_progress"]

#: Called with (stage, done, total) as the workers go on.
Advance = Callable[[str, int, int], None]

_QUIET = {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
_PORT = "29500"

#: What is told of running processes: a line of progress, or how the k-th one ended.
_News = str | tuple[int, int]


def run_workers(
    module: Sequence[str], workers: int, log: Path, advance: Advance, bandwidth_bps: float | None = None
) -> None:
    """Run `python -m module...` on every worker, until all have ended; what they say goes to `log`.

    On loopback, or, with a bandwidth (bits per second), one worker a host with
    links of it. Rank 0 tells its progress on standard output, a JSON object a
    line. When one worker fails, the others are ended. Raises `RankError` with
    the last words of the one that failed, and `InputError` if this machine
    cannot have shaped hosts.
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
        end = f"{who} was ended by {signal.Signals(-status).name}" if status < 0 else _last_words(log)
        raise RankError(f"the workers failed: {end} (all of it in {log})")


def tell_progress(rank: int) -> Advance:
    """What a worker calls as it goes on, for `run_workers` to hear; ranks other than 0 say nothing."""

    def tell(stage: str, done: int, total: int) -> None:
        if rank == 0:
            print(json.dumps({"stage": stage, "done": done, "total": total}), flush=True)

    return tell


@contextmanager
def _on_loopback(arguments: Sequence[str], workers: int, log: IO[str]) -> Iterator[list[subprocess.Popen[str]]]:
    """One process: torchrun, which watches over the workers."""
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
    """A process a worker; rank 0's first. Leaving ends all of them, and their hosts."""
    with Hosts(workers, bandwidth_bps) as hosts:
        shared = {
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
    """Pass on the progress that the first one tells. Returns (k, exit status) of the first to fail, or (0, 0)."""
    news: SimpleQueue[_News] = SimpleQueue()
    tellers = [Thread(target=_tell_end, args=(k, process, news), daemon=True) for k, process in enumerate(processes)]
    for teller in tellers:
        teller.start()
    running = len(processes)
    while running:
        match news.get():
            case (k, status):
                running -= 1
                if status != 0:
                    return k, status
            case str(line) if line.startswith('{"stage"'):
                said = json.loads(line)
                advance(said["stage"], said["done"], said["total"])
    return 0, 0


def _tell_end(k: int, process: subprocess.Popen[str], news: SimpleQueue[_News]) -> None:
    """Tell what a process says, if that can be read, and then how it ended."""
    for line in process.stdout or ():
        news.put(line)
    news.put((k, process.wait()))


def _last_words(log: Path) -> str:
    """The line of a log that most likely says what went wrong."""
    text = log.read_text(errors="replace")
    said = re.findall(r"^(?:\[rank\d+\]: )?((?:[\w.]+\.)?\w+(?:Error|Exception|Interrupt)\b.*)", text, re.MULTILINE)
    return said[0] if said else (text.strip().splitlines() or ["they said nothing"])[-1]
