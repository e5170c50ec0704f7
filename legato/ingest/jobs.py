"""Sorts profiler traces, and execution traces of the same steps, into jobs, and imports each job."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from legato.core.errors import InputError
from legato.ingest.execution_trace import import_execution_traces, is_graph, pairs
from legato.ingest.kineto.events import read_marks
from legato.ingest.kineto.importer import import_kineto
from legato.ingest.source import Progress
from legato.ingest.traced import Imported

__all__ = ["import_jobs"]

#: A job before a change, and after it.
_MOST_JOBS = 2


def import_jobs(
    paths: Sequence[Path], *, rank: int | None = None, step: str | None = None, progress: Progress | None = None
) -> list[Imported]:
    """Import one job, or two: a trace of a rank that a job already has belongs to the next job.

    A trace that does not tell its rank is one of rank 0. Raises `InputError` for
    more than two traces of a rank, and what `import_kineto` and
    `import_execution_traces` raise.
    """
    paired = pairs(paths) if any(map(is_graph, paths)) else [(None, path) for path in paths]
    jobs: list[dict[int, list[Path]]] = []
    for graph, trace in paired:
        found = (read_marks(trace).rank or 0) if len(paired) > 1 else 0
        job = next((job for job in jobs if found not in job), None)
        if job is None:
            jobs.append(job := {})
        job[found] = [trace] if graph is None else [graph, trace]
    if len(jobs) > _MOST_JOBS:
        raise InputError(f"{len(jobs)} traces of one rank (expected at most two: before a change, and after it)")
    return [
        (import_kineto if all(len(files) == 1 for files in job.values()) else import_execution_traces)(
            [path for files in job.values() for path in files], rank=rank, step=step, progress=progress
        )
        for job in jobs
    ]
