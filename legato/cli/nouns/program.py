"""Programs of traced jobs, which `legato import --program` writes and whose steps `legato simulate` predicts."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from legato.cli.axes import Given, axes
from legato.cli.nouns.job import refuse_switches, said
from legato.cli.options import Fidelity, Json, one_each, whole
from legato.cli.output import fidelity_of, note, print_json, print_parts
from legato.core.program import Program
from legato.core.text import count, percent
from legato.core.units import format_seconds

if TYPE_CHECKING:
    from legato.ingest.traced import Notes
    from legato.whole_jobs.traced import ProgramStep

__all__ = ["describe_program", "program_values", "simulate", "step_values"]

#: The options about links and switches, and the number of workers on which the program is repeated.
_Machine = Annotated[Given, axes("links", "switches", "workers", cluster=False, values="each job")]


def simulate(
    _: list[Path], programs: list[Program], /, options: _Machine, fidelity: Fidelity = None, json: Json = False
) -> None:
    """Print the parts of a program's step, as predicted and as traced."""
    from legato.whole_jobs.flow.step import network_of
    from legato.whole_jobs.flow.step import simulate_program as simulated
    from legato.whole_jobs.traced import predict, repeated, replay
    from legato.zoo.presets import machine_named

    program, fidelity = programs[0], fidelity_of(fidelity, "flows")
    refuse_switches(options, fidelity)
    machine = options.on(machine_named("h100"))
    (workers,) = one_each("workers", options.axes.get("workers"), 1, whole, None)
    many = program if workers is None else repeated(program, workers)
    if fidelity == "flows":
        switches = {axis.field: value for axis, value in options.of("switches").items()}
        step = simulated(many, machine, network_of(machine, many.workers, **switches))
    else:
        step = predict(many, machine)
    known = all(one.traced_s is not None for one in many.communications)
    traced = replay(many) if known else None
    if json:
        values = {"name": program.name, "gpus": many.workers, "predicted": step_values(step)}
        values |= {"as_traced": None if traced is None else step_values(traced), "traced_s": many.traced_s}
        print_json(values)
        return
    note(
        f"{machine.links_in_words}; the latency of a collective is {format_seconds(machine.latency_s)} inside a host, "
        f"{format_seconds(machine.network_latency_s)} between two hosts, and {format_seconds(machine.hop_s)} more for "
        "each further host"
    )
    if many is not program:
        copies = many.workers // program.workers
        note(
            f"assumed: {copies} copies of the traced job, each of which computes and sends as much as traced; only "
            "communications of the kind data connect copies"
        )
    title = f"{describe_program(many)}{said(options)}, by {fidelity}"
    print_parts(title, step.parts, None if traced is None else ("as traced", traced.parts))
    if traced and many.traced_s:
        off = percent(traced.seconds / many.traced_s - 1, signed=True)
        note(f"measured: {format_seconds(many.traced_s)}; the step as traced is off by {off}")


def step_values(step: ProgramStep) -> dict[str, Any]:
    """Return what `--json` prints for a step."""
    sent: dict[str, dict[str, float]] = {}
    for (kind, tier), nbytes in step.sent.items():
        sent.setdefault(kind, {})[tier] = nbytes
    return {
        "step_s" if name == "seconds" else name: value for name, value in asdict(step).items() if name != "sent"
    } | {"sent_nbytes": sent}


def describe_program(program: Program) -> str:
    """Return a phrase with the program's name, its number of workers and its communications by kind."""
    kinds = [one.kind for one in program.communications]
    told = ", ".join(f"{kinds.count(kind)} {kind}" for kind in dict.fromkeys(kinds))
    return f"{program.name} on {count(program.workers, 'worker')} ({told or 'no communication'})"


def program_values(program: Program, notes: Notes) -> dict[str, Any]:
    """Return what `--json` prints for an imported program."""
    return {
        "name": program.name,
        "gpus": program.workers,
        "num_communications": len(program.communications),
        "kinds": list(dict.fromkeys(one.kind for one in program.communications)),
        "traced_s": program.traced_s,
        "missing": notes.missing,
        "assumed": notes.assumed,
    }
