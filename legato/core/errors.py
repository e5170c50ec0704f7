"""The errors that legato raises on purpose.

    LegatoError
     +-- InputError          an input is wrong (command line: exit status 2)
     |    +-- FileError       a file is wrong: names the path, the field, the value and what was expected
     |    +-- PlanError       a plan does not fit its workload, model or cluster
     |    +-- TooLargeError   an input asks for more than a stated limit, and nothing has been done
     |    +-- CaptureError    a training step cannot be captured
     +-- RankError           the ranks of a job disagree, or one of them failed

`InputError` is also a `ValueError`, the exception that Python programmers expect for wrong arguments.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

__all__ = [
    "EXTRAS",
    "CaptureError",
    "FileError",
    "InputError",
    "LegatoError",
    "PlanError",
    "RankError",
    "TooLargeError",
    "missing_extra",
    "unknown_name",
]


#: The packages of each optional extra. Errors name the packages, because legato itself is not on a package index.
EXTRAS = {
    "report": "jinja2 plotly",
    "figures": "plotly kaleido",
    "parquet": "pyarrow",
    "torch": "torch",
    "flow": "numba",
    "demo": "jinja2 plotly torch transformers",
}

_LONGEST_TEXT = 1000


class LegatoError(Exception):
    """The base class of all errors that legato raises on purpose."""


class InputError(LegatoError, ValueError):
    """An input is wrong: a value, an argument or a file.

    The middle of a long message is left out, because names from files can have any length.
    """

    def __str__(self) -> str:
        text = super().__str__()
        return text if len(text) <= _LONGEST_TEXT else f"{text[: _LONGEST_TEXT - 300]} ... {text[-295:]}"


class FileError(InputError):
    """A file cannot be read, or its content is not as expected."""


class PlanError(InputError):
    """A plan does not fit the workload, model or cluster with which it is used."""


class TooLargeError(InputError):
    """A request exceeds a stated limit, and would use up all memory or time."""


class CaptureError(InputError):
    """A training step cannot be captured."""


class RankError(LegatoError, RuntimeError):
    """The ranks of a distributed job disagree, or one of them failed."""


def unknown_name(kind: str, name: str, known: Iterable[str]) -> InputError:
    """Return the error for a name that is not in a registry, with the nearest names as suggestions.

    >>> print(unknown_name("scheduler", "mgwfbp", ["fifo", "mg-wfbp"]))
    unknown scheduler 'mgwfbp'; did you mean 'mg-wfbp'? known: fifo, mg-wfbp
    """
    known = list(known)
    near = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
    hint = f"; did you mean {' or '.join(map(repr, near))}?" if near else ";"
    return InputError(f"unknown {kind} {name!r}{hint} known: {', '.join(known)}")


def missing_extra(library: str, extra: str, purpose: str) -> InputError:
    """Return the error for a library that is not installed because it belongs to an optional extra.

    >>> print(missing_extra("plotly", "report", "a report"))
    a report needs plotly: pip install jinja2 plotly
    """
    return InputError(f"{purpose} needs {library}: pip install {EXTRAS[extra]}")
