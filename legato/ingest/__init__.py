"""Importers turn other programs' traces into a `Workload` and a measured `Timeline`.

`kineto` reads traces of the PyTorch profiler, and `execution_trace` joins them with PyTorch execution traces. `chakra`
reads and writes MLCommons Chakra; `send_trace` reads and writes the CSV traces of the Network Operator Edition. All
importers produce the values of `traced`, from which `assemble` builds the workload.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from legato.ingest.traced import Imported

__all__ = ["FORMATS", "Format"]


class Format(NamedTuple):
    """A format of traces: a function that reads one worker's workload, and perhaps one that reads all ranks' program.

    Each function is written as `module:name`, with a module of `legato.ingest`. A function takes the
    files, and options as keywords.
    """

    workload: str
    program: str | None = None

    def reader(self, *, program: bool = False) -> Callable[..., Imported]:
        """Return the function for workloads, or, with `program`, the function for programs if the format has one."""
        module, _, name = ((self.program if program else None) or self.workload).partition(":")
        read: Callable[..., Imported] = getattr(import_module(f"legato.ingest.{module}"), name)
        return read


FORMATS = {
    "chakra": Format("chakra.importer:import_chakra", "chakra.importer:import_chakra_program"),
    "execution-trace": Format("execution_trace:import_execution_traces"),
    "kineto": Format("kineto.importer:import_kineto", "kineto.importer:import_kineto"),
    "send-trace": Format("send_trace:import_send_trace"),
}
