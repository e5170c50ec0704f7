"""`legato plan --shard parameters`: a table of time and memory, and the torch code for the chosen row."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from legato.cli.axes import Given, Kinds, axes
from legato.cli.options import Json, PlanOutput, PlanTimeline, keep_apart, quantity, setting
from legato.cli.output import note, print_json, print_table, say
from legato.core import files
from legato.core.errors import InputError
from legato.core.quantities import parse_bytes, parse_seconds
from legato.core.workload import Workload

if TYPE_CHECKING:
    from legato.fsdp.table import Comparison, Sharding

__all__ = ["plan"]

Precision = Literal["fp32", "bf16", "fp16"]
_ITEMSIZE = {"fp32": 4, "bf16": 2, "fp16": 2}
_Network = Annotated[Given, axes("workers", "links", "reduce", "gpus_per_card")]


@dataclass(frozen=True)
class FullySharded:
    """The options that only `--shard parameters` has."""

    PANEL = "Fully sharded training (--shard parameters)"

    memory: str | None = setting(
        None,
        "Memory that a GPU has for parameters, gradients, Adam's states and FSDP2's buffers, not for activations.",
        metavar="SIZE",
        show_default="no limit",
    )
    micro_batches: int = setting(1, "Number of micro-batches whose gradients are accumulated in one step.")
    param_dtype: Precision | None = setting(
        None, "Precision in which parameters are gathered and used.", show_default="the workload's"
    )
    reduce_dtype: Precision = setting("fp32", "Precision in which gradients are reduced.")
    host_time: str = setting("0s", "Host time per group and step; measure it if GPUs wait for the host.")
    report: Path | None = setting(
        None, "Write a page that plots time against memory and shows what a rank does.", metavar="R.html"
    )
    program: Path | None = setting(
        None, "Write a program for legato simulate, with everything that GPUs do, to this file.", metavar="P.json"
    )
    code: bool = setting(False, "Print the torch code that wraps the model as in the chosen row.", "--code")

    def sharding(self, workload: Workload, network: Given) -> Sharding:
        from legato.fsdp.table import Sharding
        from legato.fsdp.units import Precision

        gathered = workload.itemsize if self.param_dtype is None else _ITEMSIZE[self.param_dtype]
        return Sharding(
            memory_bytes=None if self.memory is None else quantity("memory", self.memory, parse_bytes),
            gpus_per_host=network.value("gpus_per_host"),
            gpus_per_card=network.value("gpus_per_card"),
            local_bandwidth_bps=network.value("local_bandwidth"),
            micro_batches=self.micro_batches,
            precision=Precision(4, gathered, _ITEMSIZE[self.reduce_dtype]),
            host_s=quantity("host-time", self.host_time, parse_seconds),
            machine=network.machine(),
        )


def plan(
    path: Path,
    /,
    network: _Network,
    how: FullySharded,
    kinds: Kinds,
    output: PlanOutput = None,
    timeline: PlanTimeline = None,
    json: Json = False,
) -> None:
    """Print the table of wrappings, and write the chosen wrapping and its timeline to files."""
    from legato.fsdp.table import compare, program_of_wrapping
    from legato.reports.html import write_report
    from legato.reports.model import Report

    keep_apart([path, *network.files], output=output, timeline=timeline, report=how.report, program=how.program)
    machines, job = kinds.machines(network), files.read(path, Workload)
    cluster, where = machines.cluster, machines.describe(kinds.collective)
    wanted = {"output": output is not None, "code": how.code, "program": how.program is not None}
    sharding = how.sharding(job, network)
    found = compare(job, cluster, sharding)
    chosen = found.rows[found.answer]
    if chosen.wrapping is None and (unused := [f"--{what}" for what in ("output", "code", "program") if wanted[what]]):
        raise InputError(f"{chosen.name} is the answer: there is nothing to wrap (leave out {', '.join(unused)})")
    if output is not None and chosen.wrapping is not None:
        files.write(output, chosen.wrapping)
    if how.program is not None and chosen.wrapping is not None:
        files.write(how.program, program_of_wrapping(job, cluster, sharding, chosen.wrapping))
    if timeline is not None:
        files.write(timeline, found.timeline(where))
    if how.report is not None:
        write_report(how.report, Report((found.report(job.name, where),)))
    if json:
        print_json([_row(found, k) for k in range(len(found.rows))])
        return
    if how.code and chosen.wrapping is not None:
        say(chosen.wrapping.as_code())
        note(found.verdict)
    else:
        print_table(found.table(f"{job.name} on {where}, parameters sharded"))
        say(found.verdict)
    if (how.code or output is not None) and not job.modules:
        note("the modules are named as in the workload; capture your model to get its own names")
    for written in (output, timeline, how.report, how.program):
        if written is not None:
            note(f"{chosen.name} -> {written}")


def _row(found: Comparison, k: int) -> dict[str, Any]:
    row = found.rows[k]
    return {
        "name": row.name,
        "iteration_s": row.seconds,
        "memory_bytes": row.nbytes,
        "buffers_bytes": row.buffers,
        "kept_bytes": row.kept,
        "gap": row.gap,
        "answer": k == found.answer,
    }
