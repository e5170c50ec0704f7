"""Sort profiler traces, and execution traces of the same steps, into jobs, and import each job."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from legato.core.errors import InputError
from legato.ingest.execution_trace import import_execution_traces, is_graph, pairs
from legato.ingest.kineto.importer import import_kineto
from legato.ingest.kineto.trace.events import Marks, read_marks
from legato.ingest.names import Transfers
from legato.ingest.source import Progress, refusals_name_files
from legato.ingest.traced import Imported

__all__ = ["import_jobs"]

#: The most jobs: one before a change, and one after it.
_MOST_JOBS = 2


@dataclass
class _Job:
    """A job: its files by rank, and its number of ranks (None if no trace tells it)."""

    workers: int | None = None
    files: dict[int, list[Path]] = field(default_factory=dict)

    def takes(self, trace: Marks) -> bool:
        """Return whether a trace can belong to this job: the number of ranks is the same, and the rank is new."""
        same = trace.workers is None or self.workers is None or trace.workers == self.workers
        return same and (trace.rank or 0) not in self.files


@refusals_name_files
def import_jobs(
    paths: Sequence[Path],
    *,
    rank: int | None = None,
    step: str | None = None,
    known: Transfers | None = None,
    progress: Progress | None = None,
) -> list[Imported]:
    """Import the traces of one job, or of two.

    A second trace of a rank, or a trace with another number of ranks, begins the second job.

    A trace that does not tell its rank counts as rank 0. Raises `InputError` for more than two jobs, and whatever
    `import_kineto` and `import_execution_traces` raise.
    """
    paired = pairs(paths) if any(map(is_graph, paths)) else [(None, path) for path in paths]
    jobs: list[_Job] = []
    for graph, path in paired:
        trace = read_marks(path) if len(paired) > 1 else Marks(path)
        job = next((job for job in jobs if job.takes(trace)), None)
        if job is None:
            jobs.append(job := _Job())
        job.workers = job.workers or trace.workers
        job.files[trace.rank or 0] = [path] if graph is None else [graph, path]
    if len(jobs) > _MOST_JOBS:
        sizes = [str(job.workers) for job in jobs if job.workers is not None]
        why = f"traces of {len(jobs)} jobs, of {', '.join(sizes)} ranks" if len(set(sizes)) > 1 else ""
        raise InputError(
            f"{why or f'{len(jobs)} traces of one rank'} (expected at most two: before a change, and after it)"
        )
    return [
        (import_kineto if all(len(files) == 1 for files in job.files.values()) else import_execution_traces)(
            [path for files in job.files.values() for path in files],
            rank=rank,
            step=step,
            known=known,
            progress=progress,
        )
        for job in jobs
    ]
