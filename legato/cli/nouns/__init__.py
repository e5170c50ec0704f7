"""The faces of nouns on the command line, one file per noun: what a verb does with it, and the options that it takes.

A verb has the options of all faces that it may call. It refuses an option that the face of the noun in its files does
not take (`legato.cli.options`), so an option means something only to the nouns whose faces take it.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType

from legato.cli.nouns import job, program, shared, shared_jobs, workload
from legato.cli.options import Options
from legato.core import files
from legato.core.errors import InputError
from legato.core.job import Job
from legato.core.program import Program
from legato.core.workload import Workload

__all__ = ["faces", "run"]

#: The module with the face of a noun, and the words for the noun, by the noun and whether several share a network.
_FACES: dict[tuple[type, bool], tuple[ModuleType, str]] = {
    (Workload, False): (workload, "one job (expected --share)"),
    (Workload, True): (shared, "jobs that share networks"),
    (Job, False): (job, "a whole job"),
    (Job, True): (shared_jobs, "a whole job"),
    (Program, False): (program, "a program"),
    (Program, True): (shared_jobs, "a program"),
}


def faces(verb: str) -> list[Callable[..., None]]:
    """Return all faces of this verb."""
    return [getattr(module, verb) for module, _ in _FACES.values() if hasattr(module, verb)]


def run(verb: str, paths: list[Path], options: Options, *, share: bool) -> None:
    """Let the face of the nouns in these files carry out the verb: workloads, unless a file says something else.

    Raises `InputError` if there is no such face, if the nouns have different faces, or if there may be only one file.
    """
    data = [files.load(path) for path in paths]
    kinds = [next((kind for kind in (Job, Program) if files.holds(one, kind)), Workload) for one in data]
    kind = min(kinds, key=[Job, Program, Workload].index)
    (_, single), (module, words) = _FACES[kind, False], _FACES[kind, share]
    if other := next((path for path, own in zip(paths, kinds, strict=True) if _FACES[own, share][0] != module), None):
        raise InputError(f"{other}: together with {single.removeprefix('a ')}s (expected only one kind)")
    face = getattr(module, verb, None)
    if face is None:
        raise InputError(f"{'--share' if share else verb}: means nothing for {words}")
    if face in (job.simulate, program.simulate) and len(paths) > 1:
        raise InputError(f"{paths[0]}: {words} together with other files (expected it alone, or --share)")
    nouns = [files.decode(one, own, str(path)) for one, own, path in zip(data, kinds, paths, strict=True)]
    options.run(face, paths, nouns, wrong=f"means nothing for {words}")
