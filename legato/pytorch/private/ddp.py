"""`DistributedDataParallel`: its settings, its reducer and its forward passes."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from legato.pytorch.private.dynamo import uncompiled

__all__ = [
    "JOIN_BEGINS",
    "IdleReducer",
    "SilentForward",
    "has_builtin_hook",
    "ignored_parameters",
    "is_joining",
    "on_backward_end",
    "own_feature",
]


def own_feature(ddp: Any) -> str:
    """Return a feature that this DDP uses and that only DDP's own passes support; empty if there is none.

    (This function misses communication hooks that are built into torch; `has_builtin_hook` finds them.)
    """
    distributed: Any = dist
    features = {
        "mixed_precision": ddp.mixed_precision,
        "delay_all_reduce_named_params": ddp._delay_all_reduce_params,
        "skip_all_reduce_unused_params": getattr(ddp, "skip_all_reduce_unused_params", False),
        "torch._dynamo.config.optimize_ddp = 'python_reducer'": ddp._use_python_reducer,
        "a communication hook": getattr(ddp, "_comm_hooks", ()),
        "a communication hook for buffers": hasattr(ddp, "buffer_hook"),
        "TORCH_DISTRIBUTED_DEBUG": distributed.get_debug_level() != distributed.DebugLevel.OFF,
    }
    return next((name for name, used in features.items() if used), "")


def is_joining(ddp: Any) -> bool:
    """Return whether the model is, or was, inside `join()`, where ranks may run out of batches."""
    return bool(ddp._join_config.enable)


#: The attribute of DDP's logger that `join()` reads when it begins, on all ranks.
JOIN_BEGINS = "_set_uneven_input_join"


def has_builtin_hook(ddp: Any) -> bool:
    """Return whether DDP's reducer has a communication hook, even if the hook is built into torch."""
    return ddp.logger is not None and bool(ddp._get_ddp_logging_data().get("comm_hook"))


def ignored_parameters(module: nn.Module) -> Any:
    """Return the names of the parameters and buffers that DDP was told to ignore."""
    return getattr(module, "_ddp_params_and_buffers_to_ignore", ())


def on_backward_end(call: Callable[[], None]) -> None:
    """Call `call()` when the running backward pass ends (DDP finalizes its buckets in the same way)."""
    torch.autograd.Variable._execution_engine.queue_callback(functools.partial(uncompiled, call))


class IdleReducer:
    """Frees the reducer of a DDP, with its buckets and hooks, while legato runs the passes, and recreates it later.

    While the reducer is away, a stand-in takes its place. If anything except a forward pass reads an attribute of the
    reducer or of the DDP's logger, the stand-in calls `asked` with the attribute's name, and then recreates the
    reducer. If a framework prepares the reducer for a backward pass, the stand-in only calls `prepare()`. The context
    `moving()` is active while the reducer's buckets are made.
    """

    def __init__(
        self,
        ddp: Any,
        asked: Callable[[str], None],
        prepare: Callable[[], None],
        moving: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self._ddp, self._asked, self._prepare, self._moving = ddp, asked, prepare, moving
        self._parameters, self._sparse = ddp._build_params_for_reducer()
        self._names = ddp._build_debug_param_to_name_mapping(self._parameters)
        self._becomes_static = False
        self._unsettled = 0  # the number of passes after which a reducer that came back may rebuild its buckets
        #: Whether a new reducer has taken the place of DDP's first one, so its hooks were registered later.
        self.came_back = False

    @property
    def is_away(self) -> bool:
        return isinstance(self._ddp.reducer, _Away)

    @property
    def rebuilds(self) -> bool:
        """Return whether the reducer has come back, and its buckets may still be rebuilt."""
        return self._unsettled > 0

    def succeed(self, former: IdleReducer) -> None:
        """Copy from `former`, which brought the reducer back, whether its buckets may still be rebuilt."""
        if former._ddp is self._ddp:
            self._unsettled, self.came_back = former._unsettled, former.came_back

    def put_away(self) -> None:
        """Free the reducer. Raises DDP's own error if one of DDP's backward passes has not finished."""
        self._ddp._check_reducer_finalized()
        self._ddp.reducer = _Away(self._come_back, self._prepare, lambda: self._ddp.reducer)
        self._ddp.logger = _Away(self._come_back, self._prepare, lambda: self._ddp.logger)
        self._becomes_static = False
        if self._ddp.static_graph:  # otherwise backward passes would ask for the reducer
            self._ddp._static_graph_delay_allreduce_enqueued = True

    def bring_back(self) -> None:
        """Make a reducer like the one that was put away."""
        ddp = self._ddp
        frozen = [p for p in self._parameters if not p.requires_grad]
        for p in frozen:
            p.requires_grad_(True)
        with self._moving():
            ddp._ddp_init_helper(self._parameters, self._sparse, self._names, ddp.static_graph)
        for p in frozen:
            p.requires_grad_(False)
        ddp._has_rebuilt_buckets, self.came_back = False, True
        self._becomes_static = ddp.static_graph
        self._unsettled = 2 if ddp.static_graph else 1

    def forward_begins(self) -> None:
        """Make a new reducer's graph static if DDP's graph is static. Call this before DDP prepares the reducer.

        Before this moment, DDP would take backward passes under `no_sync()` for parts of a static graph's first pass.
        """
        if self._becomes_static:
            self._becomes_static = self._ddp.static_graph = False  # otherwise `_set_static_graph` would do nothing
            self._ddp._set_static_graph()

    def rebuild(self) -> None:
        """Let a reducer that came back rebuild its buckets; call this on all ranks after each of DDP's backward passes.

        The buckets are rebuilt after the first pass or, if the graph is static, after the second. DDP itself would
        rebuild the buckets in its next forward pass, which one rank may run alone.
        """
        if self.rebuilds:
            self._unsettled -= 1
            self.rebuild_now()

    def rebuild_now(self) -> None:
        """Let DDP rebuild its buckets if its next forward pass would do so.

        Call this on all ranks before they do anything together. Otherwise a rank that is already in its next forward
        pass would wait there for the other ranks to rebuild.
        """
        if not self.is_away:
            with self._moving():
                self._ddp._has_rebuilt_buckets |= bool(self._ddp.reducer._rebuild_buckets())

    def _come_back(self, name: str) -> None:
        if self.is_away:
            self._asked(name)
            self.bring_back()


class _Away:
    """A stand-in for the reducer or the logger of an idle DDP."""

    def __init__(self, back: Callable[[str], None], prepare: Callable[[], None], real: Callable[[], Any]) -> None:
        self._back, self._prepare, self._real = back, prepare, real

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        self._back(name)
        return getattr(self._real(), name)

    def _rebuild_buckets(self) -> bool:
        """Return False, so that DDP's forward pass takes the buckets as unchanged."""
        return False

    def prepare_for_backward(self, _: Any) -> None:
        """Record that a framework has announced a backward pass."""
        self._prepare()


class SilentForward:
    """Stops a DDP's forward passes from preparing the reducer, so that DDP sends nothing in the backward passes.

    Call `begin()` before a pass and `end()` after it. The module itself, and everything that it calls, see DDP's
    unchanged settings. `module_begins()` is called before the module, and `module_ends(completed)` after it.
    """

    def __init__(self, ddp: Any, module_begins: Callable[[], None], module_ends: Callable[[bool], None]) -> None:
        self._ddp = ddp
        self._sends = self._completed = False

        def run(*args: Any, **kwargs: Any) -> Any:
            ddp.require_backward_grad_sync = self._sends
            module_begins()
            try:
                output = type(ddp)._run_ddp_forward(ddp, *args, **kwargs)
                self._completed = True
                return output
            finally:
                module_ends(self._completed)
                self._sends, ddp.require_backward_grad_sync = ddp.require_backward_grad_sync, False

        self._run = run

    def begin(self) -> None:
        """Keep the next forward pass from preparing the reducer."""
        self._completed = False
        self._sends, self._ddp.require_backward_grad_sync = self._ddp.require_backward_grad_sync, False
        vars(self._ddp)["_run_ddp_forward"] = self._run

    def end(self) -> bool:
        """Return whether the backward pass should send gradients according to DDP's settings."""
        del vars(self._ddp)["_run_ddp_forward"]
        self._ddp.require_backward_grad_sync = self._sends
        if self._completed:
            self._ddp.require_forward_param_sync = self._sends
        return bool(self._sends)
