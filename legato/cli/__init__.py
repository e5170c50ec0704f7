"""The command line: one file per verb, shared options in `options`, printing in `output`.

Wrong input of any kind ends with one line on standard error and exit status 2; a distributed job that fails, or output
that cannot be written, with one line and exit status 1; Ctrl-C with one line and exit status 130.
"""

from __future__ import annotations

import errno
import logging
import os
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import Annotated

import typer
from typer.exceptions import Exit, TyperException

import legato
from legato.cli import (
    advise,
    calibrate,
    capture,
    demo,
    import_,
    plan,
    rehearse,
    report,
    reproduce,
    simulate,
    sweep,
    workload,
)
from legato.cli.options import Interrupted
from legato.core.errors import InputError, LegatoError

__all__ = ["app", "main"]

#: Errors of a device that standard output is sent to.
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
#: The status that typer returns for a KeyboardInterrupt.
_INTERRUPTED = 130

app = typer.Typer(
    name="legato",
    help="Plan, prove, simulate and run the gradient transfers of data-parallel training.",
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback(invoke_without_command=True)
def _start(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> None:
    if version:
        print(f"legato {legato.__version__}")
    elif context.invoked_subcommand is None:
        print(context.get_help())
        raise Exit(2)


app.command("demo")(demo.demo)
app.command("advise")(advise.advise)
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
        sys.stdout.flush()
        if status == _INTERRUPTED:
            status = _fail("interrupted", _INTERRUPTED)
    except TyperException as error:
        near = getattr(error, "possibilities", None)  # of a misspelt option
        message = f"{error.message}; did you mean {' or '.join(near)}?" if near else error.format_message()
        status = _fail(message.replace("Value error, ", ""), 2)
    except Interrupted as error:
        status = _fail(str(error), _INTERRUPTED)
    except InputError as error:
        status = _fail(str(error), 2)
    except LegatoError as error:
        status = _fail(str(error), 1)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] != "torch":
            raise
        status = _fail("this command needs PyTorch: pip install 'legato[torch]'", 2)
    except KeyboardInterrupt:  # before typer has begun, or after
        status = _fail("interrupted", _INTERRUPTED)
    except BrokenPipeError:  # the reader has all it wants
        _discard_output()
        status = 1
    except OSError as error:
        if error.errno not in _FULL or error.filename is not None:
            raise
        _discard_output()
        status = _fail(f"cannot write standard output: {error.strerror}", 1)
    finally:
        if signal.getsignal(signal.SIGINT) is _interrupt:
            signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.exit(status if isinstance(status, int) else 0)


def _interrupt(number: int, _: object) -> None:
    """On the first Ctrl-C, end the command; ignore further ones, which would interrupt its cleaning up."""
    signal.signal(number, signal.SIG_IGN)
    raise KeyboardInterrupt


def _discard_output() -> None:
    """Have the interpreter flush what is left of standard output to nowhere, without an error."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _fail(message: str, status: int) -> int:
    with suppress(OSError):  # standard error may be closed or full, too
        print(f"legato: {' '.join(message.split())}", file=sys.stderr, flush=True)
    return status
