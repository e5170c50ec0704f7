"""The module that Python imports before a watched script.

This module first removes the traces of its own import, and then waits for an optimizer. Until an optimizer takes a
step, this module imports only the standard library.
"""

from __future__ import annotations

import atexit
import json
import os
import sys
from importlib import import_module
from importlib.machinery import ModuleSpec, PathFinder
from typing import Any

_MODULE = "torch.optim.optimizer"


class _Start:
    """An import hook that waits for the first step of any optimizer, and then loads `legato.watch.steps`."""

    def __init__(self, start: dict[str, Any]) -> None:
        self._start = start
        self._watch: Any = None
        self._pid = os.getpid()
        atexit.register(self._ended)  # functions that are registered first are called last
        sys.meta_path.insert(0, self)

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """Return Python's own specification of `torch.optim.optimizer`, changed so that its loading adds the hook."""
        if name != _MODULE:
            return None
        sys.meta_path.remove(self)  # type: ignore[arg-type]
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module

            def load_and_hook(module: Any) -> None:
                load(module)
                module.register_optimizer_step_post_hook(_observer(self))

            spec.loader.exec_module = load_and_hook  # type: ignore[method-assign]
        return spec

    def stepped(self, optimizer: Any) -> None:
        if self._watch is None:
            self._watch = self._loaded()
        if self._watch:
            self._watch.stepped(optimizer)

    def _loaded(self) -> Any:
        root = self._start["root"]
        sys.path.insert(0, root)
        try:
            from legato.watch import Settings
            from legato.watch.steps import Watch

            return Watch(Settings(**self._start["settings"]))
        except Exception as error:
            _say(f"no verdict: {type(error).__name__}: {error}")
            return False
        finally:
            sys.path.remove(root)

    def _ended(self) -> None:
        if os.getpid() != self._pid:  # a process that the script has forked
            return
        if self._watch:
            self._watch.ended()
        elif self._watch is None and os.environ.get("RANK", "0") == "0":
            started = "" if "RANK" in os.environ else " (processes that it starts are not watched: use torchrun)"
            _say(f"no verdict: no optimizer of torch took a step in this process{started}")


def _observer(start: _Start) -> Any:
    def observe(optimizer: Any, args: Any, kwargs: Any) -> None:
        start.stepped(optimizer)

    observe.only_observes = True  # type: ignore[attr-defined]
    return observe


def _say(line: str) -> None:
    if sys.__stderr__ is not None:
        sys.__stderr__.write(f"legato: watch: {line}\n")


def _begin() -> None:
    start = json.loads(os.environ.pop("LEGATO_WATCH"))
    sys.path.remove(os.path.dirname(__file__))
    os.environ["PYTHONPATH"] = start["before"]
    if not start["before"]:
        del os.environ["PYTHONPATH"]
    _Start(start)


if "LEGATO_WATCH" in os.environ:
    _begin()
    del sys.modules[__name__]
    import_module(__name__)  # the user's own sitecustomize; if there is none, Python ignores the ImportError
