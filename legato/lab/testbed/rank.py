"""One rank of a job that `testbed.launch` starts: join the process group, report progress, write the result."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import torch
import torch.distributed as dist

from legato.core import files
from legato.lab.testbed.launch import Advance, tell_progress

__all__ = ["gloo_rank", "rehearse_task"]

T = TypeVar("T")


@contextmanager
def gloo_rank() -> Iterator[Advance]:
    """Join a gloo process group with one thread for computation, and yield the function that reports progress.

    If the block raises no error, all ranks leave the group together.
    """
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    yield tell_progress(dist.get_rank())
    dist.barrier()
    dist.destroy_process_group()


def rehearse_task(kind: type[T], rehearse: Callable[[T, Advance], Any]) -> None:
    """Rehearse the task in the file that the first argument names; rank 0 writes the result to the second file."""
    task, result = map(Path, sys.argv[1:])
    with gloo_rank() as advance:
        found = rehearse(msgspec.json.decode(task.read_bytes(), type=kind), advance)
        if dist.get_rank() == 0:
            files.write_text(result, msgspec.json.encode(found).decode())
