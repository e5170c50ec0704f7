"""The command line: one file a verb, shared options in `options`, what is printed in `output`.

Wrong input of any kind ends with one line on standard error and exit status 2;
a distributed job that failed, with one line and exit status 1.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Sequence
from typing import Annotated

import typer
from typer.exceptions import Exit, TyperException

import legato
from legato.cli import calibrate, capture, demo, import_, plan, rehearse, report, reproduce, simulate, sweep, workload
from legato.core.errors import InputError, LegatoError

__all__ = ["app", "main"]

app = typer.Typer(
    name="legato",
    help="Plan, prove, simulate and run the gradient transfers of data-parallel training.",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback(invoke_without_command=True)
def _start(
    context: typer.Context, version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False
) -> None:
    if version:
        print(f"legato {legato.__version__}")
    elif context.invoked_subcommand is None:
        print(context.get_help())
        raise Exit(2)


app.command("demo")(demo.demo)
app.command("capture")(capture.capture)
app.command("import")(import_.import_)
app.command("calibrate")(calibrate.calibrate)
app.command("plan")(plan.plan)
app.command("rehearse")(rehearse.rehearse)
app.command("report")(report.report)
app.command("simulate")(simulate.simulate)
app.command("trace")(report.trace)
app.command("reproduce")(reproduce.reproduce)
app.command("sweep")(sweep.sweep)
app.command("verify")(rehearse.verify)
app.command("workload")(workload.workload)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command; ends the process with its exit status."""
    logging.basicConfig(format="%(message)s", stream=sys.stderr, level=logging.WARNING)
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _interrupt)
    try:
        status = app(list(arguments) if arguments is not None else None, standalone_mode=False)
    except Exit as done:
        status = done.exit_code
    except TyperException as error:
        status = _fail(error.format_message(), 2)
    except InputError as error:
        status = _fail(str(error), 2)
    except LegatoError as error:
        status = _fail(str(error), 1)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] not in {"torch", "transformers"}:
            raise
        status = _fail(f"this command needs {error.name}: pip install 'legato[demo]'", 2)
    except KeyboardInterrupt:
        status = _fail("interrupted", 130)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = 1
    finally:
        if signal.getsignal(signal.SIGINT) is _interrupt:
            signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.exit(status if isinstance(status, int) else 0)


def _interrupt(number: int, _: object) -> None:
    """On the first Ctrl-C, end the command; ignore further ones, which would interrupt its cleaning up."""
    signal.signal(number, signal.SIG_IGN)
    raise KeyboardInterrupt


def _fail(message: str, status: int) -> int:
    print(f"legato: {' '.join(message.split())}", file=sys.stderr)
    return status
