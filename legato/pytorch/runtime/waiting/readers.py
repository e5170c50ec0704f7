"""Finds parameters and gradients that code may read without passing their gates, and keeps these up to date.

docs/runtime.md ("What may wait") lists the ways to reach a parameter, and what notices each of them. A parameter may
wait only if its gate saw the first operation on it in the first forward passes of training. A gate does not see reads
below Python. Some of these reads call operators, which only a dispatch mode sees, and some reads call no operator. If
anything is compiled in the first passes (a function, `torch.cond`), no parameter ever waits. There is one exception: if
a single compiled graph is the model's whole pass, parameters may wait, because the graph brings them up to date.
"""

from __future__ import annotations

import fnmatch
import gc
import logging
import multiprocessing
import os
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from multiprocessing.util import Finalize
from typing import Any

import torch
import torch.utils.dlpack
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.nn.modules.module import register_module_forward_pre_hook

from legato.core.errors import RankError
from legato.pytorch.device import current_stream
from legato.pytorch.private.dynamo import on_compilation
from legato.pytorch.private.tensors import DispatchMode, leaves, uses
from legato.pytorch.runtime.waiting import gate
from legato.pytorch.runtime.waiting.buckets import IDLE, PENDING, Slot

__all__ = ["ModuleCalls", "Readers", "gradient_is_held", "parameter_is_held", "settle_before_leaving", "state_is_held"]

#: The number of training forward passes that are watched before any update may wait.
WATCHED = 2
_log = logging.getLogger("legato")


def _references(parameter: Tensor, _: Tensor | None) -> int:
    """Return the number of references to the gradient's Python object, as counted in this call."""
    grad = parameter.grad
    return sys.getrefcount(grad)


def _alone() -> tuple[tuple[Any, ...], tuple[Any, ...], int, int]:
    """Return how many uses torch and Python count for a parameter and a gradient that no other code holds."""

    def asked(parameter: Tensor, lent: Tensor | None) -> int:  # asks in the same way as `gradient_is_held`
        grad = parameter.grad
        return _references(parameter, lent) if grad is not None else 0

    parameter = nn.Parameter(torch.zeros(1))
    accumulator = get_gradient_edge(parameter).node
    parameter.grad = torch.zeros(1)
    counts = uses(parameter), uses(parameter.grad)
    references = asked(parameter, None)
    bucket = [torch.zeros(1)]
    parameter.grad = bucket[0]
    lent_references = asked(parameter, bucket[0])
    del accumulator
    return *counts, references, lent_references


_PARAMETER_ALONE, _GRADIENT_ALONE, _REFERENCES_ALONE, _LENT_REFERENCES_ALONE = _alone()


def parameter_is_held(parameter: nn.Parameter) -> bool:
    """Return whether anything except the module and autograd holds the parameter's tensor or memory.

    The holder may be another library. Call this under `invisible`.
    """
    return uses(parameter) != _PARAMETER_ALONE


def state_is_held(states: Mapping[Any, dict[str, Any]], parameter: nn.Parameter) -> bool:
    """Return whether anything except the optimizer holds a parameter's state, or a tensor in this state."""
    entries = states.get(parameter)
    if entries is None:
        return False
    if sys.getrefcount(entries) > _STATE_REFERENCES:
        return True
    return any(sys.getrefcount(value) > _STATE_REFERENCES for value in entries.values() if isinstance(value, Tensor))


#: The number of references from the state, from a local variable, and from the call of `getrefcount`.
_STATE_REFERENCES = 3


def gradient_is_held(parameter: nn.Parameter, lent: Tensor | None = None) -> bool:
    """Return whether anything except the parameter holds its gradient or the gradient's memory.

    `lent` is the runtime's own view of a bucket; other views use the same memory. Call this under `invisible`.
    """
    grad = parameter.grad
    if grad is None:
        return False
    if grad is lent:
        return _references(parameter, lent) > _LENT_REFERENCES_ALONE
    return _references(parameter, None) > _REFERENCES_ALONE or uses(grad) != _GRADIENT_ALONE


class _Imported:
    """An object that tells whether the program holds one of torch's functions: a module, a closure, a list, a frame.

    The answer is looked up again when the number of references to the function changes.
    """

    def __init__(self, function: Any) -> None:
        before = sys.getrefcount(function)
        self._function, self._references, self._found = function, 0, False
        gate.with_current_values(function)
        self._ours = sys.getrefcount(function) - before

    def __bool__(self) -> bool:
        if sys.getrefcount(self._function) != self._references:
            if gate.functions.in_use:  # modules of torch hold replacements
                return True
            torchs = [r for r in gc.get_referrers(self._function) if self._is_torchs(r)]
            known = sum(held is self._function for r in torchs for held in gc.get_referents(r))
            del torchs
            self._references = sys.getrefcount(self._function)
            self._found = self._references > self._ours + known + 1  # one reference is this call's
        return self._found

    def _is_torchs(self, holder: Any) -> bool:
        """Return whether a holder is a module of torch, or one of its tables, whose keys are hundreds of functions."""
        if type(holder) is dict and "__spec__" in holder:
            return str(holder.get("__name__")).partition(".")[0] == "torch"
        return type(holder) in (dict, set) and len(holder) > 99 and self._function in holder


#: `to_dlpack` gives a parameter's memory to other libraries. No gate notices a call through a reference of the program.
_to_dlpack = _Imported(getattr(torch.utils.dlpack, "to_dlpack"))  # noqa: B009


class Readers:
    """Decides which parameters may wait for their updates, by watching the first forward passes of the training.

    `is_own(module)` returns whether a module's forward pass is the training's own. Parameters whose names equal or
    match an entry of `current` never wait. `read_gradients` says whether anything except the parameters may hold the
    memory of gradients. With `strict`, every forward pass is watched, and `RankError` is raised if an operator reads a
    parameter that waits.
    """

    def __init__(
        self,
        is_own: Callable[[nn.Module], bool],
        current: Sequence[str] = (),
        read_gradients: bool = True,
        strict: bool = False,
    ) -> None:
        self.is_own, self._current, self.read_gradients, self._strict = is_own, current, read_gradients, strict
        #: Whether gradients may wait.
        self.gradients_wait = True
        #: Whether parameters or gradients were read on another stream than the pass's. If so, nothing waits any more.
        self.several_streams = False
        self._forwards = 0
        self._unseen: dict[int, str] = {}  # by id() of the parameter: the operator that read it unseen
        self._seen: set[int] = set()
        self._graphs = 0  # the number of forward passes that were one compiled graph
        self._of_graph: set[int] = set()  # the ids of the graph's parameters

    def is_gateable(self, slot: Slot) -> bool:
        """Return whether a gate can see all reads of a parameter: its class is plain, and its name not in `current`."""
        current = any(slot.name == it or fnmatch.fnmatchcase(slot.name, it) for it in self._current)
        return slot.plain_class is nn.Parameter and not current

    def may_wait(self, parameter: nn.Parameter) -> bool:
        """Return whether all watched reads of the parameter went through its gate."""
        if _to_dlpack:
            return False
        key = id(parameter)
        if self._forwards >= WATCHED:
            return key in self._seen and key not in self._unseen
        return self._graphs >= WATCHED and key in self._of_graph

    def note_graphs(self, ran: Sequence[set[int] | None]) -> None:
        """Note which compiled graphs have run in a forward pass of the training; `ran` is `GraphCompiler.ran`."""
        if len(ran) == 1 and ran[0] is not None:
            self._graphs += 1
            self._of_graph = ran[0]
        else:
            self.never()

    def never(self) -> None:
        """Let no parameter wait from now on, because compiled code reads parameters without their gates."""
        self._forwards = self._graphs = -(2**62)

    def note_compilation(self) -> None:
        """Record that something was compiled between two passes: from now on, neither parameters nor gradients wait."""
        self.never()
        self.gradients_wait = False

    def note_streams(self) -> None:
        """Record that a read came from another stream than the pass: from now on, no parameter or gradient waits."""
        self.several_streams = True
        self.never()
        self.gradients_wait = False

    @contextmanager
    def watch(self, slots: Iterable[Slot], install: Callable[[Slot], None]) -> Iterator[None]:
        """Watch the forward pass in this context if it is one of the first; `install` gives a parameter its gate."""
        if not 0 <= self._forwards < WATCHED and not self._strict:
            yield
            return
        gated = [slot for slot in slots if slot.plain_class is nn.Parameter]

        def compilation_begins() -> None:
            self.never()
            _remove_idle(gated)

        for slot in gated:
            slot.was_read = False
            if slot.stage == IDLE:
                install(slot)
        device = gated[0].parameter.device if gated else torch.device("cpu")
        stream = current_stream(device)

        def note(parameters: list[gate.GatedParameter], func: Any) -> None:
            if current_stream(device) != stream:
                self.note_streams()
            self._note(parameters, func)

        try:
            with on_compilation(compilation_begins), _Operators(note):
                yield
        finally:
            for slot in gated:
                if slot.was_read:
                    self._seen.add(id(slot.parameter))
            _remove_idle(gated)
        self._forwards += 1
        if self._forwards == WATCHED and self._unseen:
            _log.debug("updates of %d parameters never wait; %s", len(self._unseen), next(iter(self._unseen.values())))

    def _note(self, parameters: list[gate.GatedParameter], func: Any) -> None:
        """Note which of these parameters an operator reads although their gates have not seen any read."""
        for slot in map(gate.slot_of, parameters):
            if slot is None or slot.was_read:
                continue
            said = f"{slot.name} is read by {func}, which its gate cannot see"
            if self._strict and slot.stage == PENDING:
                raise RankError(f"{said}, while its update waits")
            self._unseen.setdefault(id(slot.parameter), said)


def _remove_idle(slots: Iterable[Slot]) -> None:
    for slot in slots:
        if slot.stage == IDLE:
            gate.remove(slot)


class _Operators(DispatchMode):
    """A dispatch mode that calls `note(parameters, operator)` for every operator with gated parameters as arguments."""

    def __init__(self, note: Callable[[list[gate.GatedParameter], Any], None]) -> None:
        super().__init__()
        self._note = note

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if found := [value for value in leaves((args, kwargs)) if type(value) is gate.GatedParameter]:
            self._note(found, func)
        return func(*args, **(kwargs or {}))


class ModuleCalls:
    """Calls `settle()` before any module runs, except the module that `is_own` names and the modules that it calls.

    When anything is compiled, `compiled()` is called as well.
    """

    def __init__(
        self,
        settle: Callable[[], None],
        is_own: Callable[[nn.Module], bool],
        compiled: Callable[[], None] = lambda: None,
    ) -> None:
        self._settle, self._is_own, self._compiled = settle, is_own, compiled
        self._hook: Any = None
        self._watch = ExitStack()

    def _module_runs(self, module: nn.Module, _: Any) -> None:
        if not self._is_own(module):
            self._settle()

    def _compilation_begins(self) -> None:
        self._settle()
        self._compiled()

    def begin(self) -> None:
        """Start watching, because updates wait."""
        if self._hook is None:
            self._hook = register_module_forward_pre_hook(self._module_runs)
            self._watch.enter_context(on_compilation(self._compilation_begins))

    def end(self) -> None:
        """Stop watching, because the training's own forward pass begins, or because no update waits."""
        if self._hook is not None:
            self._hook.remove()
            self._hook = None
            self._watch.close()


_reducers: weakref.WeakSet[Any] = weakref.WeakSet()
_finalizers: dict[int, Finalize] = {}  # by process


def settle_before_leaving(reducer: Any) -> None:
    """Call `reducer.settle()` before this process forks, and before it ends.

    A child process cannot wait for the messages of its parent. A process of `multiprocessing` does not wait for its
    threads when it ends, so the messages that they are sending would be lost.
    """
    _reducers.add(reducer)
    if os.getpid() not in _finalizers:
        _finalizers[os.getpid()] = Finalize(None, _before_end, exitpriority=0)


def _settle_all() -> None:
    for reducer in list(_reducers):
        if not reducer.in_backward:
            reducer.settle()


def _before_end() -> None:
    error = sys.exc_info()[1]
    failed = error is not None and not (isinstance(error, SystemExit) and not error.code)
    if multiprocessing.parent_process() is not None and not failed:
        _settle_all()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_settle_all)
