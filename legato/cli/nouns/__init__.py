"""The faces of nouns on the command line, a file a noun: what a verb does with it, and the options that it takes.

A verb has the options of all the faces that it may call, and refuses those that the face of the noun in its files does
not take (`legato.cli.options`): so an option means something to the nouns whose faces take it, and to no other.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType

from legato.cli.nouns import job, program, shared, shared_jobs, workload
from legato.cli.nouns.reading import read
from legato.cli.options import Options
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
    """Have the face of the noun in these files carry out the verb. Raises `InputError` if it has no such face."""
    found = read(paths, share=share)
    _, words = _FACES[found.kind, False]
    module, words = _FACES.get((found.kind, share), (None, words))
    face = getattr(module, verb, None)
    if face is None:
        raise InputError(f"--share: means nothing for {words}" if share else f"{verb}: means nothing for {words}")
    options.run(face, found, wrong=f"means nothing for {words}")
