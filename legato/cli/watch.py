"""`legato watch`"""

from __future__ import annotations

import os
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from legato.cli.ending import fail
from legato.cli.options import check_file, check_installed, make_folder
from legato.cli.output import note
from legato.cli.verdicts import as_json, print_verdict
from legato.core.errors import LegatoError


def watch(  # noqa: PLR0913
    script: Annotated[str, typer.Argument(metavar="SCRIPT", help="Training script to run unchanged.")],
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="ARGUMENTS...", help="The script's own arguments.", show_default=False)
    ] = None,
    module: Annotated[bool, typer.Option("-m", help="SCRIPT is a module, as in python -m.")] = False,
    after: Annotated[
        int, typer.Option(help="Number of steps before the two warm-up steps; the recorded steps follow.", min=1)
    ] = 10,
    steps: Annotated[int, typer.Option(help="Number of steps to record.", min=1, max=100)] = 4,
    every: Annotated[
        int | None, typer.Option(metavar="STEPS", help="Record again every STEPS steps, and say what changed.")
    ] = None,
    stop: Annotated[bool, typer.Option("--stop", help="End the script once the verdict is printed.")] = False,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", metavar="DIR", help="Keep the traces and reports in this folder, on rank 0's host."
        ),
    ] = None,
    json: Annotated[
        bool, typer.Option("--json", help="Print the last verdict as JSON on standard output when the script ends.")
    ] = False,
) -> None:
    """Run a training script, profile a few of its steps, and print what legato advise says about these steps.

    The training itself does not change. Rank 0 prints the verdict on standard error while training continues.

    Example: [bold]torchrun --nproc-per-node 8 --no-python legato watch train.py --its --own arguments[/]
    """
    from legato.watch import Settings, become

    check_installed("torch", "torch", "legato watch")
    if output is not None and os.environ.get("RANK", "0") == "0":
        make_folder(output)
        check_file("output", output / "report.html", ".html")
    settings = Settings(after, steps, every, stop, None if output is None else str(output.absolute()), json)
    become([*(["-m"] if module else []), script, *(arguments or [])], settings)


def judge() -> None:
    """Judge the traces of a watched script in a separate process: print the verdict, and write JSON and the page.

    The command line has four arguments: the folder of the traces, the JSON file of the previous verdict (or an empty
    file), the JSON file to write, and the file for the page (or ""). The script's process keeps this process's standard
    input open. When the input is closed, the script has ended, and this process ends, too.
    """
    folder, before, document, page = sys.argv[1:]
    threading.Thread(target=_end_with_script, daemon=True).start()
    try:
        _judge(Path(folder), Path(before).read_bytes(), Path(document), page)
    except LegatoError as error:
        sys.exit(fail(str(error), 2))


def _end_with_script() -> None:
    os.read(sys.stdin.fileno(), 1)
    os._exit(1)


def _judge(folder: Path, before: bytes, document: Path, page: str) -> None:
    from legato.advice import Advice, changes, of_traces
    from legato.pages import report

    verdict = of_traces(folder, say=note)
    if before:
        last = msgspec.convert(msgspec.json.decode(before)["jobs"][-1], Advice, strict=False)
        verdict = replace(verdict, changes=tuple(changes(last, verdict.advice[0])))
    document.write_bytes(msgspec.json.encode(as_json(verdict)))
    if page:
        report(verdict, path=page)
    print_verdict(verdict)
