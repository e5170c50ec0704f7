"""Functions called *faces*: each applies a verb (a command) to a noun (a kind of file). Each noun has its module.

The parameters of a face are the options of the command. A command offers the options of all its faces, but refuses an
option that is not a parameter of the face for the given files (`legato.cli.options`).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from legato.cli.nouns import job, program, shared, workload
from legato.cli.options import Options
from legato.core import files
from legato.core.errors import InputError
from legato.core.job import Job
from legato.core.program import Program
from legato.core.workload import Workload

__all__ = ["faces", "run"]

Faces = dict[str, Callable[..., None]]
_SHARED_JOBS: Faces = {"simulate": shared.simulate_jobs}
#: For each noun, alone (False) or sharing a network (True): its faces by verb, and the noun in words.
_FACES: dict[tuple[type, bool], tuple[Faces, str]] = {
    (Workload, False): ({"simulate": workload.simulate, "sweep": workload.sweep}, "one job (expected --share)"),
    (Workload, True): ({"simulate": shared.simulate, "sweep": shared.sweep}, "jobs that share networks"),
    (Job, False): ({"simulate": job.simulate, "sweep": job.sweep}, "a whole job"),
    (Job, True): (_SHARED_JOBS, "a whole job"),
    (Program, False): ({"simulate": program.simulate}, "a program"),
    (Program, True): (_SHARED_JOBS, "a program"),
}


def faces(verb: str) -> list[Callable[..., None]]:
    """Return the faces of this verb: for each noun, the function that applies the verb to it."""
    return [every[verb] for every, _ in _FACES.values() if verb in every]


def run(verb: str, paths: list[Path], options: Options, *, share: bool) -> None:
    """Read these files, and call the function that applies the verb to their contents.

    A file without a known format is read as a workload. Raises `InputError` if the verb does not apply to a file, if
    the files need different faces, or if there are too many files.
    """
    data = [files.load(path) for path in paths]
    kinds = [next((kind for kind in (Job, Program) if files.holds(one, kind)), Workload) for one in data]
    kind = min(kinds, key=[Job, Program, Workload].index)
    (_, single), (every, words) = _FACES[kind, False], _FACES[kind, share]
    if other := next((path for path, own in zip(paths, kinds, strict=True) if _FACES[own, share][0] != every), None):
        raise InputError(f"{other}: together with {single.removeprefix('a ')}s (expected only one kind)")
    face = every.get(verb)
    if face is None:
        raise InputError(f"{'--share' if share else verb}: does not apply to {words}")
    if face in (job.simulate, program.simulate) and len(paths) > 1:
        raise InputError(f"{paths[0]}: {words} together with other files (expected it alone, or --share)")
    nouns = [files.decode(one, own, str(path)) for one, own, path in zip(data, kinds, paths, strict=True)]
    options.run(face, paths, nouns, wrong=f"does not apply to {words}")
