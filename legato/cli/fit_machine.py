"""`legato fit-machine`"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from legato.cli.options import Json, keep_apart
from legato.cli.output import note, print_json, print_table
from legato.core import files
from legato.core.errors import InputError
from legato.core.job import Job
from legato.core.quantities import parse_seconds
from legato.core.table import Table
from legato.core.text import percent
from legato.core.units import format_seconds

if TYPE_CHECKING:
    from legato.whole_jobs.fit import FittedStep


def fit_machine(
    steps: Annotated[
        list[str],
        typer.Argument(metavar="J.json=SECONDS...", help="Whole jobs, each with the measured time of a step."),
    ],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="M.json", help="Write the machine to this file.")
    ] = None,
    json: Json = False,
) -> None:
    """Fit the efficiency of a machine, and if possible its host time, to measured steps of whole jobs.

    One step is enough for the efficiency. Two steps with different layers also determine the host time. Steps with
    different sequence lengths determine the efficiency of attention. With two or more steps, each step is also
    predicted from the other steps. Pass the written file as --machine to legato workload and legato layouts.

    Example: [bold]legato fit-machine job.json=4.21s -o machine.json[/]
    """
    from legato.whole_jobs.fit import fit
    from legato.zoo.presets import MACHINES

    paths, measured = zip(*map(_step, steps), strict=True)
    keep_apart(paths, output=output)
    fitted = fit([(files.read(path, Job), seconds) for path, seconds in zip(paths, measured, strict=True)])
    machine, found = fitted.machine, fitted.steps
    if output is not None:
        files.write(output, machine)
    if json:
        print_json(
            {
                "machine": machine.name,
                "numbers": fitted.numbers,
                "efficiency": machine.efficiency,
                "attention_efficiency": machine.attention_efficiency,
                "host_s": fitted.host_s,
                "steps": [_values(one) for one in found],
            }
        )
        return
    usual = sorted(one.efficiency for one in MACHINES.values())
    title = f"{machine.name}: efficiency {machine.efficiency:.4f} (published steps: {usual[0]:.2f} to {usual[-1]:.2f})"
    write = {
        "job": None,
        "measured": format_seconds,
        "efficiency alone": "{:.4f}".format,
        "predicted": format_seconds,
        "error": partial(percent, signed=True),
        "error if left out": partial(percent, signed=True),
    }
    rows = (
        (
            *(str(path), one.measured_s, one.efficiency, one.predicted_s),
            *(None if s is None else s / one.measured_s - 1 for s in (one.predicted_s, one.left_out_s)),
        )
        for path, one in zip(paths, found, strict=True)
    )
    print_table(Table.of(title, write, rows).shown())
    if len(fitted.numbers) > 1:
        note(
            f"fitted: {' and '.join(fitted.numbers)}; attention {machine.attention_efficiency:.3f}, host "
            f"{format_seconds(fitted.host_s)} per layer and micro-batch (--host-time: not in the machine's file)"
        )
    for one in fitted.odd:
        note(
            f"{one.job.name}, {format_seconds(one.measured_s)}: an odd step, whose own efficiency of "
            f"{one.efficiency:.4f} is more than 10% off the efficiency fitted to all steps (another configuration?)"
        )
    note(_sure(found) + ("" if output is None else f" -> {output}"))


def _step(text: str) -> tuple[Path, float]:
    path, equals, seconds = text.rpartition("=")
    if not equals:
        raise InputError(f"{text} (expected a file and its seconds, such as job.json=4.21s)")
    try:
        return Path(path), parse_seconds(seconds)
    except InputError as error:
        raise InputError(f"{path}: {error}") from None


def _values(one: FittedStep) -> dict[str, Any]:
    return {
        "name": one.job.name,
        "measured_s": one.measured_s,
        "efficiency": one.efficiency,
        "product_share": one.product_share,
        "predicted_s": one.predicted_s,
        "left_out_s": one.left_out_s,
    }


def _sure(found: list[FittedStep]) -> str:
    """Return a sentence about how certain the efficiency is."""
    if len(found) == 1:
        return (
            f"one step fits exactly; an error of 1% in its time changes the efficiency by "
            f"{percent(0.01 / found[0].product_share)}. Of 317 published steps, 41% were within 5% of the prediction "
            "from one other step of the same machine and framework, and 65% within 10%. Measure another layout to check"
        )
    low, high = min(one.efficiency for one in found), max(one.efficiency for one in found)
    worst = max(abs((one.left_out_s or 0.0) / one.measured_s - 1) for one in found)
    return (
        f"each step alone gives an efficiency of {low:.4f} to {high:.4f}; a step predicted from the others is at most "
        f"{percent(worst)} off"
    )
