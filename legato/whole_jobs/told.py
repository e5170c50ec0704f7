"""Present predicted steps of whole jobs in words, as tables, as bars, and on pages."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict

from msgspec.structs import replace

from legato.core.job import Job
from legato.core.table import Table, factor
from legato.core.text import count
from legato.core.units import format_bytes, format_seconds
from legato.reports.model import Breakdown, BreakdownChart, ModelReport
from legato.whole_jobs.layouts import Layouts, machines, schedule_of, title_of
from legato.whole_jobs.step import Step, predict, waits
from legato.whole_jobs.sure import SMALL_S, is_default

__all__ = ["DRAWN", "breakdown", "caveats", "faster", "machines_table", "report_of"]

#: What a chart of breakdowns shows.
DRAWN = (
    "Seconds of the busiest GPU: computing, idle in the pipeline's bubble, or waiting for communication that no "
    "computing hides. Hover over a part for its time; click a name in the legend to hide or show that part."
)
#: The memory that allocators and libraries take is not predicted.
_UNCOUNTED = "memory that allocators and libraries take is not counted"


def breakdown(name: str, parts: dict[str, float], facts: str = "", note: str = "") -> Breakdown:
    """Return a step as a bar, without parts that are only rounding errors."""
    seconds = sum(parts.values())
    return Breakdown(name, seconds, {part: s for part, s in parts.items() if abs(s) > 1e-9 * seconds}, facts, note)


def caveats(step: Step) -> Iterator[str]:
    """Yield lines about the memory, and about what a prediction leaves out."""
    machine, framework, memory = step.job.machine, step.job.framework, step.memory
    parts = ", ".join(f"{name} {format_bytes(nbytes)}" for name, nbytes in asdict(memory).items())
    has, why = format_bytes(machine.memory_nbytes), f"most of it: {memory.largest}"
    room = {
        "fits": f"fits in {has}",
        "near the limit": f"near the limit of {has} (libraries and fragments come on top; {why})",
        "does not fit": f"does not fit in {has} ({why})",
    }[step.room]
    yield f"memory of the fullest GPU: {format_bytes(memory.total)} ({parts}): {room}"
    yield machine.links_in_words
    default = is_default(machine)
    whose = "a default; legato fit-machine fits it" if default else "given or fitted"
    yield f"efficiency {machine.efficiency:g} of {machine.name} ({whose})"
    if (likely := step.interval) is None:
        fitted = " with a default efficiency" if default else ""
        yield f"no measured step is like this one{fitted} ({step.kind}), so its error is unknown"
    else:
        yield (
            f"{format_seconds(likely.low_s)} to {format_seconds(likely.high_s)} in four cases of five, according to "
            f"{likely.like.steps} measured steps of {count(likely.like.sources, 'source')} ({step.kind})"
        )
    if step.layer_s < SMALL_S and not framework.host_s:
        yield f"a layer computes for {format_seconds(step.layer_s)}: the host may take longer (legato fit-machine)"
    if step.job.model.experts > 1 and not framework.mixture_s:
        yield (
            "host work and small kernels of a mixture are counted as none: measured steps have 0 to 4 ms per layer and "
            "micro-batch, and only measuring your own step tells (--mixture-time)"
        )


def faster(best: Step) -> dict[str, Step]:
    """Return the layout's step by machine: first the machine as it is, then improved machines, the fastest first."""
    steps = {"the machine as it is": best}
    found = {name: predict(replace(best.job, machine=machine)) for name, machine in machines(best.job.machine).items()}
    return steps | dict(sorted(found.items(), key=lambda one: one[1].seconds))


def machines_table(best: Step, faster: dict[str, Step]) -> Table:
    """Return a table of the steps on other machines."""
    title = f"the same layout ({best.job.mesh}) on another machine: predicted"
    write = {"with": None, "step": format_seconds, "speedup": factor, "waits for": None}
    steps = faster.items()
    return Table.of(
        title, write, ((name, step.seconds, best.seconds / step.seconds, waits(step.parts)) for name, step in steps)
    )


def report_of(best: Step, found: Layouts | None, faster: dict[str, Step]) -> ModelReport:
    """Return a page with tables, and with drawings of what the layouts and the machines wait for."""
    charts, told, known = [], [machines_table(best, faster)], [*caveats(best), _UNCOUNTED]
    if found is not None:
        bars = [breakdown(str(step.job.mesh), step.parts, facts=_facts(step.job, found)) for step in found.best]
        charts.append(BreakdownChart("The fastest layouts", DRAWN, tuple(bars)))
        told.insert(0, found.table())
        known = [*found.verdict, f"with the first layout, {known[0]}", *known[1:]]
    bars = [breakdown(name, step.parts, note=f"{best.seconds / step.seconds:.2f}x") for name, step in faster.items()]
    title = f"The same layout ({best.job.mesh}) on another machine"
    hint = "One thing of the machine is better. The time of each step is followed by the speedup."
    charts.append(BreakdownChart(title, hint if charts else f"{DRAWN} {hint}", tuple(bars)))
    advice = f"{known[0][0].upper()}{known[0][1:]}."
    return ModelReport(
        title_of(best.job), advice=advice, told=tuple(told), asides=tuple(known[1:]), breakdowns=tuple(charts)
    )


def _facts(job: Job, found: Layouts) -> str:
    """Return facts about a layout, but not its mesh. Recomputation and sharding are left out if always the same."""
    plural = "es" if job.microbatches > 1 else ""
    parts = [schedule_of(job), f"{job.microbatches:,} micro-batch{plural} of {job.microbatch}"]
    for field, word in (("recompute", "recomputed"), ("shard", "sharded")):
        if len({getattr(step.job, field) for step in found.best}) > 1:
            parts.append(f"{word}: {getattr(job, field)}")
    return " · ".join(part for part in parts if part)
