"""Files that hold nouns."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from legato.core import files
from legato.core.errors import InputError
from legato.core.job import Job
from legato.core.program import Program
from legato.core.workload import Workload

__all__ = ["Files", "read"]

Noun = TypeVar("Noun", Job, Program, Workload)
_WORDS = {Job: "whole job", Program: "program", Workload: "workload"}


@dataclass(frozen=True)
class Files(Generic[Noun]):
    """Files that hold nouns of one kind."""

    paths: list[Path]
    kind: type[Noun]
    nouns: list[Noun]

    @property
    def what(self) -> str:
        """The kind in words."""
        return _WORDS[self.kind]

    def only(self, instead: str = "") -> Noun:
        """The only noun. Raises `InputError`, which names what else is possible, on several."""
        if len(self.nouns) > 1:
            raise InputError(f"{self.paths[0]}: a {self.what} beside other files (expected it alone{instead})")
        return self.nouns[0]


def read(paths: list[Path], *, share: bool = False) -> Files[Any]:
    """The nouns in these files: workloads, unless they say something else.

    Raises `InputError` on several kinds, but for whole jobs and programs that `share` a network.
    """
    data = [files.load(path) for path in paths]
    kinds = [next((kind for kind in (Job, Program) if files.holds(one, kind)), Workload) for one in data]
    kind = min(kinds, key=list(_WORDS).index)
    fitting = (Job, Program) if share and kind is Job else (kind,)
    if other := next((path for path, own in zip(paths, kinds, strict=True) if own not in fitting), None):
        raise InputError(f"{other}: beside {_WORDS[kind]}s (expected one of them)")
    nouns: list[Any] = [files.decode(one, own, str(path)) for one, own, path in zip(data, kinds, paths, strict=True)]
    return Files(paths, kind, nouns)
