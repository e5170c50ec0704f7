"""Importers turn other programs' traces into a `Workload` and a measured `Timeline`.

`kineto` reads traces of the PyTorch profiler, and `execution_trace` joins them with PyTorch execution traces. `chakra`
reads and writes MLCommons Chakra. All importers produce the values of `traced`, from which `assemble` builds the
workload.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any, NamedTuple

__all__ = ["FORMATS", "Format", "load"]


class Format(NamedTuple):
    """A format of traces: a function that reads one worker's workload, and perhaps one that reads all ranks' program.

    Each function is written as `module:name`. A function takes the files, and options as keywords.
    """

    workload: str
    program: str | None = None
    #: A function that writes a workload in this format.
    export: str = ""

    def reader(self, *, program: bool = False) -> Callable[..., Any]:
        """Return the function for workloads, or, with `program`, the function for programs if the format has one."""
        return load((self.program if program else None) or self.workload)


def load(path: str) -> Callable[..., Any]:
    """Return the function that is written as `module:name`."""
    module, _, name = path.partition(":")
    function: Callable[..., Any] = getattr(import_module(module), name)
    return function


FORMATS = {
    "chakra": Format(
        "legato.ingest.chakra.importer:import_chakra", "legato.ingest.chakra.importer:import_chakra_program"
    ),
    "execution-trace": Format("legato.ingest.execution_trace:import_execution_traces"),
    "kineto": Format("legato.ingest.kineto.importer:import_kineto", "legato.ingest.kineto.importer:import_kineto"),
    "send-trace": Format("legato.lab.send_trace:import_send_trace", export="legato.lab.send_trace:export_send_trace"),
}
