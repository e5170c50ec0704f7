"""The faces of nouns on the command line, a file a noun: what a verb does with it, and the options that it takes.

A verb has the options of all the faces that it may call, and refuses those that the face of the noun in its files does
not take (`legato.cli.options`): so an option means something to the nouns whose faces take it, and to no other.
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

#: The modules with the faces of what files hold, by the noun, and by whether several share a network; and it in words.
_FACES: dict[tuple[type, bool], tuple[ModuleType, str]] = {
    (Workload, False): (workload, "one job (expected --share)"),
    (Workload, True): (shared, "jobs that share networks"),
    (Job, False): (job, "a whole job"),
    (Job, True): (shared_jobs, "a whole job"),
    (Program, False): (program, "a program"),
    (Program, True): (shared_jobs, "a program"),
}


def faces(verb: str) -> list[Callable[..., None]]:
    """All faces of this verb."""
    return [getattr(module, verb) for module, _ in _FACES.values() if hasattr(module, verb)]


def run(verb: str, paths: list[Path], options: Options, *, share: bool) -> None:
    """Have the face of the nouns in these files carry out the verb: workloads, unless a file says something else.

    Raises `InputError` if there is no such face, on nouns of several faces, and on several where only one is possible.
    """
    data = [files.load(path) for path in paths]
    kinds = [next((kind for kind in (Job, Program) if files.holds(one, kind)), Workload) for one in data]
    kind = min(kinds, key=[Job, Program, Workload].index)
    (_, single), (module, words) = _FACES[kind, False], _FACES[kind, share]
    if other := next((path for path, own in zip(paths, kinds, strict=True) if _FACES[own, share][0] != module), None):
        raise InputError(f"{other}: beside {single.removeprefix('a ')}s (expected one of them)")
    face = getattr(module, verb, None)
    if face is None:
        raise InputError(f"{'--share' if share else verb}: means nothing for {words}")
    if face in (job.simulate, program.simulate) and len(paths) > 1:
        raise InputError(f"{paths[0]}: {words} beside other files (expected it alone, or --share)")
    nouns = [files.decode(one, own, str(path)) for one, own, path in zip(data, kinds, paths, strict=True)]
    options.run(face, paths, nouns, wrong=f"means nothing for {words}")
