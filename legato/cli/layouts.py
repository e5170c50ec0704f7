"""`legato layouts`"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from legato.cli.axes import Given, axes
from legato.cli.nouns.model import LLM, shape_of
from legato.cli.options import Json, Options, check_file, keep_apart, quantity, setting, taken_by
from legato.cli.output import note, print_json, print_table
from legato.core import files
from legato.core.errors import InputError
from legato.core.job import Job
from legato.core.quantities import parse_bytes

if TYPE_CHECKING:
    from legato.whole_jobs.layouts import Layouts
    from legato.whole_jobs.step import Step


@dataclass(frozen=True)
class Searched:
    """The options that describe the job whose layouts are compared."""

    gpus: int | None = setting(None, "Number of GPUs of the job.")
    batch: int | None = setting(None, "Number of sequences in a step, over all replicas.")
    sequence: int | None = setting(None, "Number of tokens in a sequence.", show_default="8192, or the paper's")
    preset: str = setting("megatron-core", "Framework to model: megatron-core, nemo, torchtitan or megatron-2021.")
    memory: str | None = setting(None, "Memory of a GPU, such as 72GiB.", show_default="the device's")
    number: int = setting(10, "Number of layouts to show.")

    def find(self, name: str, links: Given) -> Layouts:
        """Return the fastest layouts. Raises `InputError` if an option is missing or no layout fits in memory."""
        from legato.whole_jobs.layouts import layouts
        from legato.zoo.presets import machine_named

        if self.gpus is None or self.batch is None:
            raise InputError(f"--{'batch' if self.gpus else 'gpus'}: missing (expected at least 1)")
        if name == LLM:
            raise InputError("llm: has no shape here (expected a language model, its configuration file or a job)")
        return layouts(
            shape_of(name, {} if self.sequence is None else {"sequence": self.sequence}),
            gpus=self.gpus,
            batch=self.batch,
            machine=links.on(machine_named("h100")),
            framework=self.preset,
            memory_nbytes=None if self.memory is None else quantity("memory", self.memory, parse_bytes),
            number=self.number,
            name=Path(name).stem if name.endswith(".json") else name,
        )


@dataclass(frozen=True)
class Shown:
    """The options that say where the answer is written."""

    report: Path | None = setting(
        None, "Write a page that shows what GPUs wait for in each layout, and on faster machines.", metavar="L.html"
    )
    json: Json = False


def _search(
    name: str,
    /,
    what: Searched,
    links: Annotated[Given, axes("links", cluster=False)],
    how: Shown,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", metavar="J.json", help="Write the job with the fastest layout that fits to this file."
        ),
    ] = None,
) -> None:
    """Find the fastest layouts of a model."""
    keep_apart(links.files, output=output, report=how.report)
    check_file("report", how.report, ".html")
    found = what.find(name, links)
    if output is not None:
        files.write(output, found.first.job)
    _show(found.first, found, how)


def _of_job(name: str, /, how: Shown) -> None:
    """Print how much faster a job would be on better machines, with the same layout."""
    from legato.whole_jobs.step import predict

    keep_apart([Path(name)], report=how.report)
    check_file("report", how.report, ".html")
    _show(predict(files.read(name, Job)), None, how)


def layouts(
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME|J.json",
            help="A language model, its configuration file, or a whole job. A job keeps its layout.",
        ),
    ],
    options: Annotated[Options, taken_by(_search, _of_job)],
) -> None:
    """Find the fastest layouts of a model on a number of GPUs, and what a faster machine would save.

    All layouts that divide evenly and fit in memory are compared by the predicted time of a step. The table shows what
    each layout waits for: bubbles or exposed communication. For a job in a file, the table compares only machines.

    Example: [bold]legato layouts llama-3-70b --gpus 1024 --batch 1024[/]
    """
    face = _of_job if name.endswith(".json") and files.holds(files.load(name), Job) else _search
    options.run(face, name, wrong="does not apply to a whole job")


def _show(best: Step, found: Layouts | None, how: Shown) -> None:
    from legato import pages
    from legato.whole_jobs.told import caveats, faster, machines_table

    better, report = faster(best), how.report
    if report is not None:
        pages.report(best if found is None else found, path=report)
    if how.json:
        print_json(
            {
                "layouts": [] if found is None else found.rows,
                "compared": None if found is None else found.number,
                "complete": None if found is None else found.complete,
                "faster": {label: step.seconds for label, step in better.items() if step is not best},
            }
        )
        return
    if found is not None:
        print_table(found.table())
        for line in found.verdict:
            note(line)
    print_table(machines_table(best, better))
    for caveat in caveats(best):
        note(caveat)
    if report is not None:
        note(f"report -> {report}")
