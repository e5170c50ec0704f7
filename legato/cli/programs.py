"""Programs of traced jobs: `legato import --program` writes one, `legato simulate` predicts it."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from msgspec.structs import replace
from rich.table import Table

from legato.cli.options import one_each, quantity, whole
from legato.cli.output import fidelity_of, note, print_json, print_table
from legato.cli.whole_jobs import OF_NETWORK, is_given, links, network_given, refuse_network, refuse_others
from legato.core import files
from legato.core.errors import InputError
from legato.core.program import Program
from legato.core.quantities import parse_seconds
from legato.core.text import count, percent
from legato.core.units import format_bandwidth, format_seconds

if TYPE_CHECKING:
    from legato.core.job import Machine
    from legato.ingest.traced import Notes
    from legato.whole_jobs.traced import ProgramStep

__all__ = ["describe_program", "program_of", "program_values", "simulate_program", "step_values"]

_USED = {"workloads", "fidelity", "workers", "bandwidth", "local_bandwidth", "gpus_per_host", "latency", "json"}


def program_of(data: list[bytes], paths: list[Path]) -> Program | None:
    """The program in the only file, or None if it holds something else. Raises `InputError` if it is one of several."""
    programs = [path for one, path in zip(data, paths, strict=True) if files.holds(one, Program)]
    if programs and len(paths) > 1:
        raise InputError(f"{programs[0]}: a program beside other files (expected it alone)")
    return files.decode(data[0], Program, str(paths[0])) if programs else None


def simulate_program(typed: typer.Context, program: Program) -> None:
    """The verb `legato simulate` for a program, with the other options as they were typed."""
    from legato.whole_jobs.traced import predict, repeated, replay

    refuse_others(typed, _USED | set(OF_NETWORK))
    machine, fidelity = _machine(typed), fidelity_of(typed.params["fidelity"], "flows")
    (workers,) = one_each("workers", typed.params["workers"], 1, whole, None)
    many = repeated(program, workers) if workers is not None and is_given(typed, "workers") else program
    if fidelity == "flows":
        from legato.whole_jobs.flow.step import simulate_program as simulate

        network, where = network_given(typed, machine, _workers(many))
        step = simulate(many, machine, network)
    else:
        refuse_network(typed)
        step, where = predict(many, machine), ""
    known = all(one.traced_s is not None for one in many.communications)
    traced = replay(many) if known else None
    if typed.params["json"]:
        values = {"name": program.name, "gpus": _workers(many), "predicted": step_values(step)}
        values |= {"as_traced": None if traced is None else step_values(traced), "traced_s": many.traced_s}
        print_json(values)
        return
    inside, between = (format_bandwidth(8 * speed) for speed in (machine.link_bytes_per_s, machine.card_bytes_per_s))
    note(
        f"network: {count(machine.gpus_per_host, 'GPU')} a host with {inside} inside ({percent(machine.link_share, 0)} "
        f"of it is reached) and {between} to others ({percent(machine.card_share, 0)}); beside its bytes, a collective "
        f"takes {format_seconds(machine.latency_s)} inside a host, {format_seconds(machine.network_latency_s)} between "
        f"two, and {format_seconds(machine.hop_s)} for each further one"
    )
    if many is not program:
        copies = _workers(many) // _workers(program)
        note(
            f"assumed: {copies} copies of the job, which compute and send as much as traced; between copies go only "
            "communications of the kind data"
        )
    table = Table("of the step", title=f"{describe_program(many)}{where}, by {fidelity}", header_style="dim")
    for head in [*(["as traced"] if traced else []), "predicted", "share"]:
        table.add_column(head, justify="right")
    for kind, seconds in _parts(step).items():
        own = [format_seconds(_parts(traced)[kind])] if traced else []
        if seconds or (traced and _parts(traced)[kind]):
            table.add_row(kind, *own, format_seconds(seconds), percent(seconds / step.seconds if step.seconds else 0))
    own = [format_seconds(traced.seconds)] if traced else []
    table.add_row("step", *own, format_seconds(step.seconds), percent(1.0), style="bold green")
    print_table(table)
    if traced and many.traced_s:
        off = percent(traced.seconds / many.traced_s - 1, signed=True)
        note(f"measured: {format_seconds(many.traced_s)}; the step as traced is off by {off}")


def _machine(typed: typer.Context) -> Machine:
    """The links that the options describe; what is not given is as on the default machine of whole jobs."""
    from legato.zoo.presets import machine_named

    machine = links(typed, machine_named("h100"))
    if not is_given(typed, "latency"):
        return machine
    latency_s = quantity("latency", typed.params["latency"], parse_seconds)
    return replace(machine, latency_s=latency_s, network_latency_s=latency_s, hop_s=0.0)


def _parts(step: ProgramStep) -> dict[str, float]:
    rest = {"waiting for the host": step.idle_s, "waiting for other workers": step.late_s}
    return {"computing": step.computing_s, **rest, **step.exposed_s}


def step_values(step: ProgramStep) -> dict[str, Any]:
    """What `--json` prints of a step."""
    sent: dict[str, dict[str, float]] = {}
    for (kind, tier), nbytes in step.sent.items():
        sent.setdefault(kind, {})[tier] = nbytes
    return {
        "step_s" if name == "seconds" else name: value for name, value in asdict(step).items() if name != "sent"
    } | {"sent_nbytes": sent}


def _workers(program: Program) -> int:
    return sum(len(lane.workers) for lane in program.lanes)


def describe_program(program: Program) -> str:
    """A program in words: its workers, and how many communications of each kind it has."""
    kinds = [one.kind for one in program.communications]
    told = ", ".join(f"{kinds.count(kind)} {kind}" for kind in dict.fromkeys(kinds))
    return f"{program.name} on {count(_workers(program), 'worker')} ({told or 'no communication'})"


def program_values(program: Program, notes: Notes) -> dict[str, Any]:
    """What `--json` prints of an imported program."""
    return {
        "name": program.name,
        "gpus": _workers(program),
        "num_communications": len(program.communications),
        "kinds": list(dict.fromkeys(one.kind for one in program.communications)),
        "traced_s": program.traced_s,
        "missing": notes.missing,
        "assumed": notes.assumed,
    }
