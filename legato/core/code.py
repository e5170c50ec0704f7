"""Load the user's own code: functions in files that are named on the command line, and entry points of packages.

No data file can name code to run. Code runs only if the user types its file name or has installed its package.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, wraps
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from types import ModuleType
from typing import Any

from legato.core.errors import InputError

__all__ = ["blame", "guarded", "installed", "load", "load_installed", "own"]


def load(spec: str, kind: type[InputError] = InputError) -> Any:
    """Return the function or class in FILE.py, where `spec` is "FILE.py:FUNCTION".

    The file's folder is added to `sys.path`, as when Python runs a file. If the function cannot be loaded, or the
    user's code raises an exception, raises an error of type `kind`.
    """
    name, colon, function = spec.rpartition(":")
    if not colon or not name or not function:
        raise kind(f"{spec!r} (expected FILE.py:FUNCTION)")
    path = Path(name)
    if not path.is_file():
        raise kind(f"{path}: no such file (expected FILE.py:FUNCTION)")
    module = _imported(path, kind)
    found = getattr(module, function, None)
    if not callable(found):
        known = [n for n, v in vars(module).items() if callable(v) and v.__module__ == module.__name__]
        near = difflib.get_close_matches(function, known, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]!r}?" if near else f"it has: {', '.join(known) or 'none'}"
        raise kind(f"{path}: no function {function!r}; {hint}")
    return found


def _imported(path: Path, kind: type[InputError]) -> ModuleType:
    name = f"legato_training_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise kind(f"{path}: not a Python file (expected FILE.py:FUNCTION)")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    folder = str(path.resolve().parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    with blame(f"{path}: importing it", kind):
        spec.loader.exec_module(module)
    return module


@contextmanager
def blame(doing: str, kind: type[InputError] = InputError) -> Iterator[None]:
    """Turn an exception in the user's code into an error of type `kind`: one line that names the line of the code.

    The error message begins with `doing`, a description of the code that ran.
    """
    try:
        yield
    except kind:
        raise
    except (Exception, SystemExit) as error:
        message = " ".join(str(error).split()) or "no message"
        where = _user_line(error)
        raise kind(f"{doing} raised {type(error).__name__}: {message}{where and f' ({where})'}") from error


def _user_line(error: BaseException) -> str:
    """Return file:line of the innermost frame outside legato, torch and the interpreter."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}:{error.lineno}"
    torch = sys.modules.get("torch")
    files = [importlib.__file__, *([] if torch is None else [torch.__file__])]
    roots = [str(Path(__file__).parents[1]), *(str(Path(file).parent) for file in files if file)]
    lines = [
        f"{frame.filename}:{frame.lineno}"
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith(("<", *roots))
    ]
    return lines[-1] if lines else ""


def guarded(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    """Return the function, with its exceptions turned into errors by `blame`. Errors call the function `name`."""

    @wraps(function)
    def call(*values: Any, **options: Any) -> Any:
        with blame(name):
            return function(*values, **options)

    return call


def own(spec: str) -> Any:
    """Return the function that `load` returns, but pickled by value, for processes that lack the user's module."""
    found = load(spec)
    sys.modules.pop(getattr(found, "__module__", ""), None)
    return found


@cache
def installed(group: str) -> dict[str, EntryPoint]:
    """Return the entry points of this group in the installed packages, by name, without importing them."""
    return {one.name: one for one in entry_points(group=group)}


def load_installed(group: str, name: str) -> Any:
    """Load the object that an entry point of this group names. Raises `InputError` if importing it fails."""
    found = installed(group)[name]
    with blame(f"{group} {name!r} ({found.value}): importing it"):
        return found.load()
