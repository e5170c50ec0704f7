"""`legato watch`: profile a few steps of an unchanged training script, and print what `legato advise` says about them.

[Note: the script's own process] The command replaces itself with `python train.py`, by `exec`. So `__main__`,
arguments, pickles, spawned workers, tracebacks, the exit status and Ctrl-C behave as without legato. The only part of
the command that stays is `startup/sitecustomize.py`, which Python imports when it starts. This module restores the
environment variables that made Python import it, and registers a hook that runs after the steps of all torch
optimizers.

[Note: training does not wait] The training thread only counts steps, which is the only cost for steps that are not
recorded. All other work runs in the background: a thread sends the traces to rank 0 through the job's store, and
low-priority processes compress the traces and make the verdict. legato calls no collective, and the ranks need not
agree on anything, because all of them count the same steps.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NoReturn

import msgspec

from legato.core.errors import InputError

__all__ = ["ROOT", "WARM_UP", "Settings", "become"]

#: Steps that run under the profiler before the recorded steps, because its first steps are slow.
WARM_UP = 2
#: The folder that legato is imported from.
ROOT = str(Path(__file__).parent.parent.parent)
_STARTUP = str(Path(__file__).parent / "startup")


@dataclass(frozen=True)
class Settings:
    """Settings of `legato watch`: which steps to record, and what to do with the traces.

    After the first `after` steps and the warm-up, `steps` steps are recorded. Every `every` steps, another recording is
    made. `stop` ends the script after the first verdict. `output` is the folder that keeps the traces. With `json`, the
    last verdict is printed when the script has ended.
    """

    after: int = 10
    steps: int = 4
    every: int | None = None
    stop: bool = False
    output: str | None = None
    json: bool = False

    def __post_init__(self) -> None:
        if self.every is not None and self.every <= WARM_UP + self.steps:
            least = WARM_UP + self.steps + 1
            raise InputError(
                f"--every {self.every}: too few for {self.steps} recorded steps (expected {least} or more)"
            )
        if self.every is not None and self.stop:
            raise InputError("--every with --stop (expected only one of the two)")

    @property
    def last(self) -> int:
        """Return the number of the last step of the first recording."""
        return self.after + WARM_UP + self.steps


def become(arguments: Sequence[str], settings: Settings) -> NoReturn:
    """Replace this process by `python ARGUMENTS`, which runs as without legato, except that its steps are watched."""
    if sys.flags.ignore_environment:
        raise InputError("python -E or -I: Python would not load the watcher of the script (expected neither)")
    flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    if "TORCHELASTIC_RUN_ID" in os.environ:  # torchrun starts scripts without buffers
        flags.append("-u")
    before = os.environ.get("PYTHONPATH", "")
    start = {"settings": asdict(settings), "root": ROOT, "before": before}
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, [_STARTUP, before])),
        "LEGATO_WATCH": msgspec.json.encode(start).decode(),
    }
    os.execve(sys.executable, [sys.executable, *flags, *arguments], environment)
