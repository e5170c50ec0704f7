"""legato's forward passes: DDP's own forward pass runs and sends nothing, and legato watches reads of parameters."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

from torch import nn

from legato.core.errors import RankError
from legato.pytorch.compiled.compiler import GraphCompiler
from legato.pytorch.parameters import ModuleFingerprint
from legato.pytorch.private.ddp import SilentForward
from legato.pytorch.private.dynamo import (
    compiled_by,
    compiled_module,
    compiles_two_ways,
    is_compiled,
    is_left_to_eager_mode,
    is_whole_frame,
    on_compilation,
    uncompiled,
)
from legato.pytorch.private.tensors import has_forward_hooks
from legato.pytorch.runtime.attached.graph_sender import GraphSender
from legato.pytorch.runtime.reducer import Reducer
from legato.pytorch.runtime.waiting.readers import Readers

__all__ = ["ForwardPasses", "Hook"]


class ForwardPasses:
    """Runs the forward passes of a DDP whose gradients legato sends.

    `fingerprint` is the fingerprint of the DDP's module. `sender_of(parameter)` returns the object that sends a
    parameter's gradients. A parameter never waits if its name equals an entry of `current`, or matches the entry as a
    pattern. With `strict`, readers are watched in every pass, not only in the first passes.
    """

    def __init__(
        self,
        ddp: Any,
        fingerprint: ModuleFingerprint,
        sender_of: Callable[[nn.Parameter], GraphSender | None],
        current: Sequence[str],
        strict: bool,
    ) -> None:
        self._ddp, self._module, self._fingerprint = ddp, ddp.module, fingerprint
        self.readers = Readers(
            self._is_own, current, not getattr(self._module, "reads_no_gradients", False), strict=strict
        )
        self._silent = SilentForward(ddp, self._module_begins, self._module_ends)
        self._scope = ExitStack()
        self._wrappers: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # modules that are known to contain the DDP
        self._reducer: Reducer | None = None  # the reducer of the running pass
        #: Whether the last pass was compiled, at least in part.
        self.in_graphs = False
        self._compiler = GraphCompiler(
            sender_of, partial(is_whole_frame, function=compiled_module(self._module).forward)
        )
        self.compile_graphs()

    @property
    def running(self) -> bool:
        """Return whether one of legato's forward passes is running."""
        return self._reducer is not None

    def compile_graphs(self) -> None:
        """From now on, compile graphs for legato's passes too."""
        self.leave_graphs = compiles_two_ways(self._ddp, self._compiler, lambda: self.running)

    def begin(self, reducer: Reducer, compiled: str) -> None:
        """Let legato run the forward pass that begins; `compiled` says whether dynamo compiles it."""
        self.in_graphs = bool(compiled) or self._fingerprint.compiled()
        if self.in_graphs:  # compiled code reads parameters without their gates
            if self._may_be_one_graph(compiled):
                GraphSender(reducer).hide_gates()
            else:
                self.readers.never()
                reducer.settle()
        reducer.messages.forwards += self._ddp.require_backward_grad_sync
        if reducer.messages.tracer:
            reducer.messages.tracer.switch("forward")
        self._compiler.ran.clear()
        self._reducer = reducer
        self._silent.begin()

    def end(self, output: Any) -> None:
        """Clean up after a pass that has returned."""
        assert self._reducer is not None
        reducer, self._reducer = self._reducer, None
        sends = self._silent.end()
        if self.in_graphs and self._module.training:
            self.readers.note_graphs(self._compiler.ran)
        if waiting := GraphSender(reducer).show_gates():
            self.readers.never()
            raise RankError(
                f"{waiting}: its update waits for the compiled graph that read it before, which did not run this time; "
                "use a plan without forward overlap"
            )
        if not self.in_graphs:
            reducer.delivery.watch_streams()
        if sends:
            reducer.armed = True
            reducer.backward_scope.expect(output)
        if reducer.messages.tracer:
            reducer.messages.tracer.end_forward(output)

    def fail(self) -> None:
        """Clean up after a pass that has raised an exception."""
        assert self._reducer is not None
        reducer, self._reducer = self._reducer, None
        self._silent.end()
        GraphSender(reducer).show_gates()

    def _module_begins(self) -> None:
        """Start watching reads; DDP is about to call its module."""
        assert self._reducer is not None
        if self.in_graphs:
            self._scope.enter_context(on_compilation(self._reducer.settle))
        elif self._module.training:
            self._scope.enter_context(self._reducer.watch())

    def _module_ends(self, completed: bool) -> None:
        """Stop watching reads; DDP's module has returned, or has raised an exception."""
        if completed:
            self._scope.close()
        else:
            self._scope.__exit__(*sys.exc_info())

    def _may_be_one_graph(self, compiled: str) -> bool:
        """Return whether the forward pass runs only compiled code if the compiler divides no graph."""
        inner = compiled_module(self._module)
        if compiled == "caller" or not (compiled or is_compiled(self._module)):
            return False
        hooked = has_forward_hooks(self._module) or has_forward_hooks(inner)
        return not hooked and hasattr(inner.forward, "__code__") and not is_left_to_eager_mode(inner.forward)

    def _is_own(self, module: nn.Module) -> bool:
        """Return whether a call of this module is the model's forward pass: the module is the DDP, or contains it."""
        if module is self._ddp or module in self._wrappers:
            return True
        if any(inner is self._ddp for inner in module.modules()):
            self._wrappers.add(module)
            return True
        return False


class Hook:
    """A forward hook of legato's. A copy or a pickle of a model has `no_hook` in place of this hook.

    The hook calls `call(compiled, output)`; `compiled` says whether dynamo compiles the forward pass.
    """

    def __init__(self, call: Callable[[str, Any], None], attachment: Any = None) -> None:
        self._call, self.attachment = call, attachment

    def __call__(self, _: nn.Module, args: Any, output: Any = None) -> None:
        uncompiled(self._call, compiled_by(sys._getframe()), output)

    def __deepcopy__(self, memo: Any) -> Callable[..., None]:
        return no_hook

    def __reduce__(self) -> Any:
        return partial, (no_hook,)


def no_hook(*_: Any) -> None:
    """Do nothing."""
