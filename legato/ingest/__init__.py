"""Floor 1: foreign traces become a `Workload`, and the times in them a measured `Timeline`.

`kineto` reads traces of the PyTorch profiler, `execution_trace` joins them with
PyTorch execution traces, `chakra` reads and writes MLCommons Chakra, and
`send_trace` the CSV traces of the Network Operator Edition. All importers fill
in the values of `traced`, from which `assemble` builds the workload.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from legato.ingest.traced import Imported

__all__ = ["FORMATS", "Format"]


class Format(NamedTuple):
    """A format of traces: the function that reads one worker's part, and the one that reads what all workers do.

    Both are `module:name` below `legato.ingest`, and take the files, and as keywords the options that they have.
    """

    workload: str
    program: str | None = None

    def reader(self, *, program: bool = False) -> Callable[..., Imported]:
        """Return the function that reads a workload, or a program, which not every format has."""
        module, _, name = ((self.program if program else None) or self.workload).partition(":")
        read: Callable[..., Imported] = getattr(import_module(f"legato.ingest.{module}"), name)
        return read


FORMATS = {
    "chakra": Format("chakra.importer:import_chakra", "chakra.importer:import_chakra_program"),
    "execution-trace": Format("execution_trace:import_execution_traces"),
    "kineto": Format("kineto.importer:import_kineto", "kineto.importer:import_kineto"),
    "send-trace": Format("send_trace:import_send_trace"),
}
