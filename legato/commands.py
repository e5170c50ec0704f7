"""All commands of `legato`, and the exit statuses with which they end.

Every failure is one line on standard error. The exit status is 2 for wrong input of any kind, 1 for a distributed job
that fails or output that cannot be written, and 130 for Ctrl-C.
"""

from __future__ import annotations

import errno
import inspect
import logging
import os
import sys
from collections.abc import Callable, Sequence
from typing import Annotated

import typer
from typer.exceptions import Exit, TyperException

import legato
from legato.cli import (
    advise,
    calibrate,
    capture,
    fit_machine,
    import_,
    layouts,
    plan,
    report,
    simulate,
    sweep,
    watch,
    workload,
)
from legato.cli.ending import INTERRUPTED, fail
from legato.cli.options import Interrupted, with_options
from legato.cli.output import note
from legato.core.errors import InputError, LegatoError
from legato.lab.cli import demo, rehearse, reproduce

__all__ = ["app", "run"]

#: Errors of the device to which standard output is written.
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)

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


_COMMANDS: dict[str, Callable[..., None]] = {
    "demo": demo.demo,
    "watch": watch.watch,
    "advise": advise.advise,
    "capture": capture.capture,
    "import": import_.import_,
    "calibrate": calibrate.calibrate,
    "plan": plan.plan,
    "rehearse": rehearse.rehearse,
    "report": report.report,
    "simulate": simulate.simulate,
    "trace": report.trace,
    "reproduce": reproduce.reproduce,
    "sweep": sweep.sweep,
    "verify": rehearse.verify,
    "workload": workload.workload,
    "layouts": layouts.layouts,
    "fit-machine": fit_machine.fit_machine,
}
for _name, _command in _COMMANDS.items():
    # Help wraps at the width of the terminal, not at the line breaks of the docstring.
    _paragraphs = (inspect.getdoc(_command) or "").split("\n\n")
    app.command(
        _name,
        help="\n\n".join(" ".join(paragraph.split()) for paragraph in _paragraphs),
        # Arguments after the script of `watch` belong to the script.
        context_settings={"allow_interspersed_args": _command is not watch.watch},
    )(with_options(_command))


class _Notes(logging.Handler):
    """A log handler that prints legato's messages like the notes of a command."""

    def emit(self, record: logging.LogRecord) -> None:
        note(record.getMessage())


def run(arguments: Sequence[str] | None = None) -> int:
    """Run a command, and return its exit status."""
    logging.basicConfig(handlers=[_Notes()], level=logging.WARNING)
    try:
        status = app(list(arguments) if arguments is not None else None, standalone_mode=False)
        sys.stdout.flush()
        if status == INTERRUPTED:  # typer returns it for a KeyboardInterrupt
            return fail("interrupted", INTERRUPTED)
        return status if isinstance(status, int) else 0
    except TyperException as error:
        near = getattr(error, "possibilities", None)  # of a misspelt option
        message = f"{error.message}; did you mean {' or '.join(near)}?" if near else error.format_message()
        return fail(message.replace("Value error, ", ""), 2)
    except LegatoError as error:
        statuses = {Interrupted: INTERRUPTED, InputError: 2, LegatoError: 1}
        return fail(str(error), next(status for kind, status in statuses.items() if isinstance(error, kind)))
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] != "torch":
            raise
        return fail("this command needs PyTorch: pip install torch", 2)
    except MemoryError:
        return fail("not enough memory on this machine (try a smaller workload, or fewer workers)", 1)
    except BrokenPipeError:  # the reader has closed the pipe
        _discard_output()
        return 1
    except OSError as error:
        if error.errno not in _FULL or error.filename is not None:
            raise
        _discard_output()
        return fail(f"cannot write standard output: {error.strerror}", 1)


def _discard_output() -> None:
    """Redirect standard output to nowhere, so that the interpreter can flush the rest of it without an error."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
