"""`legato watch`: profiles a few steps of a training that runs as it is, and says what `legato advise` says of them.

[Note: the script's own process] The command makes way for `python train.py`, by `exec`. So `__main__`, arguments,
pickles, spawned workers, tracebacks, the exit status and Ctrl-C are the script's own, and need no imitation. What is
left of the command is one module that Python imports when it starts (`startup/sitecustomize.py`): it undoes the changes
of the environment that brought it there, and puts a hook after the steps of all of torch's optimizers.

[Note: nothing waits for it] A step is counted on the thread that trains; so few of them are recorded that this is the
only cost of the training. All else is done in the background: a thread sends the traces to rank 0 through the job's
store, and processes of low priority compress and judge them. No collective is called, and the ranks do not negotiate:
each counts the same steps.
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

#: Steps that run under the profiler before those that are recorded: its first ones are slow.
WARM_UP = 2
#: The folder that legato is imported from.
ROOT = str(Path(__file__).parent.parent.parent)
_STARTUP = str(Path(__file__).parent / "startup")


@dataclass(frozen=True)
class Settings:
    """Which steps are recorded, and what becomes of the traces.

    After the first `after` steps, `steps` are recorded, and so again `every` steps later. `stop` ends the script then.
    `output` is the folder that keeps the traces, and `json` prints the last verdict when the script has ended.
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
            raise InputError("--every with --stop (expected one or the other)")

    @property
    def last(self) -> int:
        """The last step of the first recording."""
        return self.after + WARM_UP + self.steps


def become(arguments: Sequence[str], settings: Settings) -> NoReturn:
    """Become Python with these arguments, as it would be without legato, except for what watches it."""
    if sys.flags.ignore_environment:
        raise InputError("python -E or -I: what watches the script would be ignored (expected neither)")
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
