"""Every use of torch's private interfaces in legato, for torch 2.11 to 2.15.

No other file names an attribute or a module of torch that begins with an underscore, so only this file must be checked
against a new version of torch. Each definition says what it is for, and what could replace the private name.
"""

from __future__ import annotations

import copy
import functools
import inspect
import logging
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from datetime import timedelta
from typing import Any, Literal, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._functorch import eager_transforms, vmap
from torch.distributed.distributed_c10d import (
    _get_default_group,
    _get_default_store,
    _new_process_group_helper,
    _unregister_process_group,
    _world,
)
from torch.nn.utils import stateless
from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

__all__ = [
    "JOIN_BEGINS",
    "PRIVATE_METADATA",
    "TRANSFORMS",
    "DispatchMode",
    "IdleReducer",
    "PrefixStore",
    "SilentForward",
    "autograd_node_number",
    "backend_name",
    "begin_state",
    "begins_with_step",
    "compile_graphs",
    "compiled_by",
    "compiled_module",
    "compiles_two_ways",
    "compiles_with",
    "copy_all",
    "count_steps",
    "counts_steps",
    "current_node",
    "current_node_number",
    "default_store",
    "drop_accumulator",
    "group_timeout",
    "has_builtin_hook",
    "has_forward_hooks",
    "has_gradient_hooks",
    "has_step_hooks",
    "hooks_on",
    "ignored_parameters",
    "in_backward_pass",
    "in_functional_call",
    "invisible",
    "is_compiled",
    "is_compiled_in_place",
    "is_joining",
    "is_left_to_eager_mode",
    "is_replaced",
    "is_whole_frame",
    "leaves",
    "memory_uses",
    "module_tables",
    "multiply_all",
    "new_gloo",
    "not_compiled",
    "note_step",
    "observe_step",
    "on_backward_end",
    "on_compilation",
    "on_profilers",
    "operator_schema",
    "outside_transforms",
    "own_feature",
    "own_group",
    "rebind_step",
    "runs_compiled",
    "scripted_as",
    "steps_in_backward",
    "storage_id",
    "tensor_without_memory",
    "uncompiled",
    "unhooked_step",
    "uses",
    "version_of",
    "will_run",
    "without_dispatch_modes",
    "without_overrides",
    "without_step_hooks",
    "wrapped_module",
]

_log = logging.getLogger("legato")

# ---- dispatch, overrides, compilation ---------------------------------------------------

#: A decorator that keeps dynamo from compiling a function, and all that it calls. `torch.compiler.disable` does the
#: same, but imports dynamo right away (1 s).
not_compiled: Any = torch._disable_dynamo


@not_compiled
def uncompiled(call: Callable[..., Any], *args: Any) -> Any:
    """Call `call(*args)`, and let dynamo compile nothing in it."""
    return call(*args)


#: A context in which `__torch_function__` of tensor subclasses is not called. (torch documents it, but only under
#: `torch._C`.)
without_overrides: Any = torch._C.DisableTorchFunctionSubclass

#: A function that returns all leaves of nested lists, tuples, dicts and registered classes. `torch.utils.pytree` will
#: be its public module.
leaves: Callable[[Any], list[Any]] = tree_leaves


@contextmanager
def on_compilation(call: Callable[[], None]) -> Iterator[None]:
    """Call `call()` whenever dynamo begins to compile something inside this context."""
    from torch._dynamo.callback import callback_handler

    def started(_: Any) -> None:
        compiling, torch.compiler._is_compiling_flag = torch.compiler._is_compiling_flag, False
        try:  # optimizers behave differently while this flag is set
            call()
        finally:
            torch.compiler._is_compiling_flag = compiling

    callback_handler.register_start_callback(started)
    try:
        yield
    finally:
        # This makes a new list, because dynamo may be calling the functions in the old one.
        callback_handler.start_callbacks = [c for c in callback_handler.start_callbacks if c is not started]


def compiled_by(frame: Any) -> Literal["", "module", "caller"]:
    """Return whether dynamo compiles the module whose forward hook is running; `frame` is the hook's frame.

    The answer is `module` if `torch.compile` was given the module, `caller` if compiled code calls it, and empty
    otherwise.
    """
    if not runs_compiled():
        return ""
    caller = frame
    while caller.f_code.co_filename != nn.modules.module.__file__:
        caller = caller.f_back
    while caller.f_code.co_filename == nn.modules.module.__file__:
        caller = caller.f_back
    return "module" if caller.f_globals.get("__name__", "").startswith("torch._dynamo") else "caller"


def runs_compiled() -> bool:
    """Return whether dynamo compiles the functions that the caller calls, because code up the stack was compiled."""
    return torch._C._dynamo.eval_frame.get_eval_frame_callback() not in (None, False)


@contextmanager
def compiles_with(compile_graph: Callable[[Any, Any, Any], Any]) -> Iterator[None]:
    """Let dynamo call `compile_graph(backend, graph, inputs)` for each graph, except in DDP's forward passes.

    If `compile_graph` returns None, the backend compiles the graph. `compile_graph` takes the place of `DDPOptimizer`,
    which dynamo calls for graphs of a DDP.
    """
    if "torch._dynamo" in sys.modules:
        _take_place_of_ddp_optimizer()
    active: Any = nn.parallel.DistributedDataParallel
    before = active._active_ddp_module
    active._active_ddp_module = _Active(compile_graph)
    try:
        yield
    finally:
        active._active_ddp_module = before


class _Active(NamedTuple):
    """A stand-in for the DDP whose forward pass runs, so that dynamo calls `compile_graph` for the graphs."""

    compile_graph: Callable[[Any, Any, Any], Any]
    bucket_bytes_cap: int = 2**62


def compiles_two_ways(
    ddp: nn.Module, compile_graph: Callable[[Any, Any, Any], Any], ours: Callable[[], bool]
) -> Callable[[], None]:
    """From now on, compile each graph of the DDP's forward passes in two ways; `ours()` chooses one for each run.

    If `ours()` returns True, the result of `compile_graph(backend, graph, inputs)` runs, otherwise the result of
    `DDPOptimizer`, as usual. Only graphs for `inductor` and `aot_eager` are compiled in two ways. Nothing changes for
    graphs that dynamo has compiled before, or in passes without gradients. No function of legato's own is compiled.

    Returns a function that ends the second way of compiling. The second way also ends when nothing refers to the
    returned function any more.
    """
    _take_place_of_ddp_optimizer()  # DDP's constructor has imported dynamo
    _skip_own_functions()
    way = _SecondWay(compile_graph, ours)
    _second_ways[ddp] = weakref.ref(way)
    return way.end


class _SecondWay:
    """A second way to compile the graphs of a DDP's forward passes. It ends when nothing refers to its `end`."""

    def __init__(self, compile_graph: Callable[[Any, Any, Any], Any], ours: Callable[[], bool]) -> None:
        self.compile_graph, self.ours = compile_graph, ours
        self.ended = False

    def end(self) -> None:
        self.ended = True


_second_ways: weakref.WeakKeyDictionary[nn.Module, weakref.ref[_SecondWay]] = weakref.WeakKeyDictionary()


def _active_way() -> _SecondWay | None:
    """Return the `_SecondWay` of the DDP whose forward pass runs, or None."""
    active = cast(Any, nn.parallel.DistributedDataParallel)._active_ddp_module
    reference = _second_ways.get(active) if isinstance(active, nn.Module) else None
    way = None if reference is None else reference()
    return None if way is None or way.ended else way


@functools.cache
def _skip_own_functions() -> None:
    """Keep dynamo from compiling any function in `legato.pytorch`. dynamo still compiles others that these call."""
    from torch._dynamo import trace_rules

    trace_rules.add("legato.pytorch")


@functools.cache
def _take_place_of_ddp_optimizer() -> None:
    from torch._dynamo.backends import distributed

    class Optimizer(distributed.DDPOptimizer):
        def compile_fn(self, gm: Any, example_inputs: Any, **options: Any) -> Any:
            compile_graph, backend = super().compile_fn, self.backend_compile_fn
            active = cast(Any, nn.parallel.DistributedDataParallel)._active_ddp_module
            if isinstance(active, _Active) and not options:
                compiled = active.compile_graph(backend, gm, example_inputs)
                if compiled is not None:
                    return compiled
            way = _active_way()
            if way is None or options or not torch.is_grad_enabled() or not _is_cut(backend):
                return compile_graph(gm, example_inputs, **options)
            return _TwoWays(compile_graph, backend).compile(way, gm, example_inputs)

    distributed.DDPOptimizer = Optimizer


class _TwoWays:
    """A graph compiled in DDP's own way (`compile_graph`), and in the second way of each DDP that runs the graph.

    dynamo shares a graph between modules of one class. While dynamo compiles, the graph is compiled in the way that the
    first pass needs. For each other way, the graph is compiled when a pass first needs this way, or at once if a later
    compilation is impossible.
    """

    def __init__(self, compile_graph: Callable[[Any, Any], Any], backend: Any) -> None:
        self._compile_graph, self._backend = compile_graph, backend
        self._compiled: Any = None
        self._in_second_ways: weakref.WeakKeyDictionary[_SecondWay, Any] = weakref.WeakKeyDictionary()
        self._again: _Again | None = None
        self._last: weakref.ref[_SecondWay] | None = None

    def compile(self, way: _SecondWay, graph: Any, inputs: Any) -> Callable[..., Any]:
        """Compile the graph, now or later, and return the function that runs it."""
        self._again = _Again(graph, inputs)  # now, because compilation changes the graph and the context
        ours = way.ours()
        if ours:
            self._in_second_ways[way] = way.compile_graph(self._backend, graph, inputs)
        else:
            self._compiled = self._compile_graph(graph, inputs)
        if not self._again.later:
            self._in_way(None if ours else way)
            self._again = None
        return self.run

    def run(self, *args: Any) -> Any:
        """Run the graph in the way that the current pass needs."""
        if in_backward_pass() and cast(Any, nn.parallel.DistributedDataParallel)._active_ddp_module is None:
            # Activation checkpointing runs the graph again, and must run it in the same way, so that it saves the same
            # tensors.
            way = None if self._last is None else self._last()
        else:
            way = _active_way()
            way = None if way is None or not way.ours() else way
            self._last = None if way is None else weakref.ref(way)
        return self._in_way(way)(*args)

    def _in_way(self, way: _SecondWay | None) -> Any:
        """Return the graph as compiled in the second way `way` or, if None, in DDP's own way."""
        if way is not None:
            if way not in self._in_second_ways:
                self._in_second_ways[way] = self._second(way)
            if (compiled := self._in_second_ways[way]) is not None:
                return compiled
        if self._compiled is None:
            assert self._again is not None
            self._compiled = self._again.compile(self._compile_graph)
        return self._compiled

    def _second(self, way: _SecondWay) -> Any:
        if self._again is None:
            return None
        try:
            return self._again.compile(functools.partial(way.compile_graph, self._backend))
        except Exception as error:
            if not self._again.later:
                raise  # dynamo handles this error
            _log.debug("a graph is compiled as for DDP only: %s: %s", type(error).__name__, error)
            return None


class _Again:
    """A graph that dynamo is compiling, kept for another compilation at once or, if `later` is true, at any later time.

    The graph can be compiled `later` if its compilation adds no guards (dynamo's checks before compiled code may run).
    Sizes that vary, and memory that inputs share, need guards.
    """

    def __init__(self, graph: Any, inputs: Sequence[Any]) -> None:
        from torch._dynamo.utils import to_fake_tensor
        from torch._functorch import config

        self._graph, self._inputs = _copy_of(graph), list(inputs)
        guards = torch._guards
        self._compile_context, self._context = guards.CompileContext.try_get(), copy.copy(guards.TracingContext.get())
        with config.patch(fake_tensor_allow_unsafe_data_ptr_access=False):  # as dynamo makes such a mode
            mode = torch._subclasses.FakeTensorMode(shape_env=cast(Any, self._context.fake_mode).shape_env)
        self.later = _adds_no_guards(graph, inputs)
        if self.later:  # these inputs will not exist any more then
            self._inputs = [to_fake_tensor(x, mode) for x in inputs]
            describer = mode.fake_tensor_converter.meta_converter.describer
            describer.lookup_tensor.clear()
            describer.lookup_storage.clear()
        self._context.fake_mode = mode

    def compile(self, compile_graph: Callable[[Any, Any], Any]) -> Any:
        """Compile a copy of the graph in a copy of the context, as dynamo would compile it now."""
        from torch._dynamo.callback import CallbackTrigger, callback_handler
        from torch._dynamo.convert_frame import compile_lock

        context = copy.copy(self._context)
        context.hop_dispatch_set_cache = type(context.hop_dispatch_set_cache)()
        with ExitStack() as stack:
            if self.later:
                stack.enter_context(compile_lock)
                stack.enter_context(getattr(torch.compiler, "_compile_session_context", nullcontext)())
                identity = getattr(self._compile_context, "compile_id", None)
                stack.enter_context(callback_handler.install_callbacks(CallbackTrigger.DYNAMO, str(identity)))
                stack.enter_context(torch._guards.compile_context(self._compile_context))
                stack.enter_context(_disable_current_modes())
            stack.enter_context(torch._guards.tracing(context))
            return compile_graph(_copy_of(self._graph), list(self._inputs))


def _adds_no_guards(graph: Any, inputs: Sequence[Any]) -> bool:
    from torch.fx.experimental.symbolic_shapes import free_symbols

    if any(type(x) not in (Tensor, nn.Parameter) or x.layout != torch.strided for x in inputs):
        return False
    if len({storage_id(x.untyped_storage()) for x in inputs}) < len(inputs):
        return False
    try:
        return not any(free_symbols(node.meta.get("example_value")) for node in graph.graph.nodes)
    except Exception:  # a node has a value of an unknown kind
        return False


def _copy_of(graph: Any) -> Any:
    """Return a copy of a dynamo graph, with everything that AOTAutograd reads. The copy shares the parameters."""
    copied = torch.fx.GraphModule(graph, copy.deepcopy(graph.graph))
    for name, child in graph.named_children():
        if isinstance(child, torch.fx.GraphModule) and name in vars(copied)["_modules"]:
            setattr(copied, name, _copy_of(child))
    for name, value in vars(graph).items():
        vars(copied).setdefault(name, value)
    copied.meta = dict(graph.meta)
    for node, before in zip(copied.graph.nodes, graph.graph.nodes, strict=True):
        node.meta.pop("grapharg", None)  # this entry holds the input itself
        if hasattr(before, "_dynamo_source"):
            node._dynamo_source = before._dynamo_source
    return copied


def compiled_module(module: nn.Module) -> nn.Module:
    """Return the module that `torch.compile` has wrapped in this one, or the module itself."""
    return cast(nn.Module, getattr(module, "_orig_mod", module))


def wrapped_module(module: nn.Module) -> nn.Module | None:
    """Return the module that `torch.compile` or DDP has wrapped in this one; None if this is not a wrapper."""
    if isinstance(module, nn.parallel.DistributedDataParallel):
        return cast(nn.Module, module.module)
    return cast(nn.Module, module._orig_mod) if type(module).__module__.startswith("torch._dynamo") else None


def has_forward_hooks(module: nn.Module) -> bool:
    """Return whether the user's hooks run around the module's `forward`: hooks on this module or on all modules."""
    of_all = nn.modules.module
    return bool(
        module._forward_hooks or module._forward_pre_hooks or of_all._global_forward_hooks
        or of_all._global_forward_pre_hooks
    )  # fmt: skip


def is_whole_frame(graph: Any, function: Any) -> bool:
    """Return whether this one graph has all operations of a call of `function` (a bound method)."""
    code, reason = getattr(function, "__code__", None), getattr(graph, "compile_subgraph_reason", None)
    if code is None or reason is None or reason.graph_break or not reason.user_stack:
        return False
    frame = reason.user_stack[0]
    return (frame.filename, frame.name) == (code.co_filename, code.co_name) and frame.lineno >= code.co_firstlineno


def is_left_to_eager_mode(function: Any) -> bool:
    """Return whether dynamo may silently run a compiled function (a bound method) without compiling it.

    dynamo does so beyond the limit of recompilations, and if `torch.compiler.set_stance` tells it to.
    """
    from torch._dynamo import config, eval_frame

    entries = torch._C._dynamo.eval_frame._debug_get_cache_entry_list(function.__code__)
    return len(entries) >= config.recompile_limit or eval_frame._stance.stance != "default"


def backend_name(backend: Any) -> str:
    """Return the name of a backend of `torch.compile`, even if dynamo has wrapped the backend."""
    from torch._dynamo.eval_frame import innermost_backend

    innermost = innermost_backend(backend)
    return str(getattr(innermost, "compiler_name", None) or getattr(innermost, "__name__", innermost))


def compile_graphs(backend: Any, graph: Any, inputs: Any, function_of: Callable[..., Any]) -> Any:
    """Compile a graph as the backend does, except for the forward and backward graphs that AOTAutograd makes of it.

    Each forward or backward graph becomes the function `function_of(phase, graph, inputs, compile_piece)`, where phase
    is `forward` or `backward`. `compile_piece(graph, inputs, whole)` compiles the graph, or a part of it, as the
    backend does. For a part, `compile_piece` also returns example results for the inputs; for the whole graph, it
    returns an empty list. Returns None if the backend is neither `inductor` nor `aot_eager`.
    """
    from torch._dynamo.backends.debugging import aot_eager, boxed_nop
    from torch._dynamo.eval_frame import innermost_backend
    from torch._functorch import config

    backend = innermost_backend(backend)
    # Graphs in autograd's cache are not cut. A whole graph may reuse a donated buffer, but a later piece still reads
    # it.
    with config.patch(enable_autograd_cache=False, donated_buffer=False):
        if isinstance(backend, torch._TorchCompileInductorWrapper):
            return _compile_with_inductor(backend.config, graph, inputs, function_of)
        if getattr(backend, "compiler_fn", backend) is aot_eager:

            def compile_piece(piece: Any, inputs: Any, whole: bool) -> Any:
                (results,) = piece.graph.output_node().args
                return boxed_nop(piece, inputs), [] if whole else [node.meta.get("val") for node in results]

            phases = {
                phase: functools.partial(lambda phase, g, i: function_of(phase, g, i, compile_piece), phase)
                for phase in ("forward", "backward")
            }
            return aot_eager(graph, inputs, fw_compiler=phases["forward"], bw_compiler=phases["backward"])
    return None


def _is_cut(backend: Any) -> bool:
    """Return whether `compile_graphs` can compile for this backend."""
    from torch._dynamo.backends.debugging import aot_eager
    from torch._dynamo.eval_frame import innermost_backend

    backend = innermost_backend(backend)
    inductor = isinstance(backend, torch._TorchCompileInductorWrapper)
    return inductor or getattr(backend, "compiler_fn", backend) is aot_eager


def _compile_with_inductor(patches: dict[str, Any], graph: Any, inputs: Any, function_of: Callable[..., Any]) -> Any:
    from torch._inductor import config
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner
    from torch._inductor.fx_passes.post_grad import view_to_reshape
    from torch._inductor.utils import BoxedBool
    from torch._inductor.virtualized import V
    from torch.fx.passes.fake_tensor_prop import FakeTensorProp

    def inner(graph: Any, inputs: Any, **options: Any) -> Any:
        if options.get("is_inference"):
            return compile_fx_inner(graph, inputs, **options)
        context, fake_mode = torch._guards.TracingContext.try_get(), torch._guards.detect_fake_mode(inputs)

        def compile_piece(piece: Any, inputs: Any, whole: bool) -> Any:
            chosen: dict[str, Any] = options
            results: Any = []
            with config.patch(patches), V.set_fake_mode(fake_mode), torch._guards.tracing(context):
                if not whole:
                    chosen = {**options, "static_input_idxs": (), "cudagraphs": BoxedBool(False)}
                    # Convolutions may have changed the layout of this piece's inputs. inductor itself begins with the
                    # same call.
                    view_to_reshape(piece)
                    results = FakeTensorProp(piece, fake_mode).propagate_dont_convert_inputs(*inputs)
                    # The next piece is compiled for the strides of these results.
                    piece.graph.output_node().meta["user_visible_output_idxs"] = range(len(results))
                return compile_fx_inner(piece, inputs, **chosen), results

        return function_of("backward" if options.get("is_backward") else "forward", graph, inputs, compile_piece)

    return compile_fx(graph, inputs, inner_compile=inner, config_patches=patches)


class DispatchMode(TorchDispatchMode):
    """A dispatch mode that sees every operator below autograd, also in compiled code, and does not affect compilation.

    The documentation of dispatch modes ("Extending PyTorch") gives this private path.
    """

    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True


def without_dispatch_modes() -> Any:
    """Return a context in which the user's dispatch modes see no operator; cheap if none is active."""
    return _disable_current_modes() if torch._C._len_torch_dispatch_stack() else nullcontext()


def scripted_as(function: Any, like: Any) -> None:
    """Make `torch.jit.script` replace `function` by `like` in calls. `function` must never be deleted."""
    table: Any = torch.jit._builtins
    operator = table._find_builtin(like)
    if operator is not None:
        table._register_builtin(function, operator)


def outside_transforms() -> Any:
    """Return a context outside all active transforms of `torch.func` and `torch.jit.trace`; cheap if none is active."""
    tracing = torch._C._get_tracing_state()
    transforming = torch._C._functorch.peek_interpreter_stack() is not None
    return _outside_transforms(tracing, transforming) if tracing or transforming else nullcontext()


@contextmanager
def _outside_transforms(tracing: Any, transforming: bool) -> Iterator[None]:
    from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

    torch._C._set_tracing_state(None)  # pyrefly: ignore[missing-attribute]
    try:
        with temporarily_clear_interpreter_stack() if transforming else nullcontext():
            yield
    finally:
        torch._C._set_tracing_state(tracing)  # pyrefly: ignore[missing-attribute]


def operator_schema(func: Any) -> Any:
    """Return the schema of an `OpOverload`; None for a higher-order operator."""
    return getattr(func, "_schema", None)


# ---- autograd ---------------------------------------------------------------------------


def on_backward_end(call: Callable[[], None]) -> None:
    """Call `call()` when the running backward pass ends (DDP finalizes its buckets in the same way)."""
    torch.autograd.Variable._execution_engine.queue_callback(functools.partial(uncompiled, call))


class invisible:
    """A cheap context in which computation is invisible to the user's autograd graph, to gates and to dispatch modes.

    It can be entered only once.
    """

    __slots__ = ("_gradients", "_modes", "_overrides")

    def __enter__(self) -> None:
        self._gradients, self._overrides, self._modes = torch.is_grad_enabled(), without_overrides(), None
        torch._C._set_grad_enabled(False)
        self._overrides.__enter__()
        if torch._C._len_torch_dispatch_stack():
            self._modes = _disable_current_modes()
            self._modes.__enter__()

    def __exit__(self, *error: Any) -> None:
        if self._modes is not None:
            self._modes.__exit__(*error)
        self._overrides.__exit__(*error)
        torch._C._set_grad_enabled(self._gradients)


def in_backward_pass() -> bool:
    """Return whether autograd runs a backward pass on this thread."""
    return torch._C._current_graph_task_id() != -1


def autograd_node_number() -> int:
    """Return the number that autograd gives to the next node that this thread creates."""
    return int(torch.autograd._get_sequence_nr())


def current_node() -> Any:
    """Return the node that the backward pass on this thread is running; None outside a backward pass."""
    return torch._C._current_autograd_node()


def will_run(node: Any) -> bool:
    """Return whether the running backward pass adds to the gradient of this leaf, or has already added to it."""
    try:
        return torch._C._will_engine_execute_node(node)
    except RuntimeError:  # the pass belongs to `torch.autograd.grad`, which adds to no gradient
        return False


def current_node_number() -> int | None:
    """Return the number of the node that the backward pass on this thread is running; None outside a backward pass.

    AccumulateGrad nodes have numbers from 2**63 on.
    """
    node = torch._C._current_autograd_node()
    return None if node is None else int(node._sequence_nr())


# ---- tensors and modules ----------------------------------------------------------------


#: The functions through which the transforms of `torch.func` take in tensors: names, by module.
TRANSFORMS: dict[Any, tuple[str, ...]] = {
    eager_transforms: ("_wrap_tensor_for_grad",),
    vmap: ("_add_batch_dim",),
}

#: Attributes of a tensor that say nothing about its values.
PRIVATE_METADATA = ("_version", "_backward_hooks", "_post_accumulate_grad_hooks")


def version_of(tensor: Tensor) -> int:
    """Return how often the tensor was changed in place; changes through `.data` are not counted."""
    return tensor._version


def hooks_on(node: Any) -> dict[int, Callable[..., Any]]:
    """Return the dictionary of the Python hooks that run after an autograd node, also of those added later."""
    handle = node.register_hook(print)
    handle.remove()
    return cast("dict[int, Callable[..., Any]]", handle.hooks_dict_ref())


def drop_accumulator(parameter: nn.Parameter) -> None:
    """Make autograd forget a parameter's AccumulateGrad node and the node's hooks, as a cast of the parameter does."""
    data, other = parameter.data, torch.float64 if parameter.dtype is not torch.float64 else torch.float32
    parameter.data = data.new_empty(0, dtype=other)
    parameter.data = data


def has_gradient_hooks(parameter: nn.Parameter) -> bool:
    """Return whether the user has registered hooks on the parameter's gradient."""
    return bool(parameter._backward_hooks) or bool(parameter._post_accumulate_grad_hooks)


def storage_id(storage: torch.UntypedStorage) -> int:
    """Return the address of a storage's C++ object. Live storages may share memory, but never this address."""
    return int(storage._cdata)


def copy_all(targets: list[Tensor], sources: list[Tensor]) -> None:
    """Copy many tensors to targets of the same shapes in one call; torch's optimizers use such calls."""
    torch._foreach_copy_(targets, sources)


def multiply_all(tensors: list[Tensor], factor: float) -> None:
    """Multiply many tensors by a number, in place, in one call."""
    torch._foreach_mul_(tensors, factor)


def memory_uses(tensor: Tensor) -> int:
    """Return how many tensors and storages share the tensor's memory, including a storage that this call creates."""
    return int(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata))


def uses(tensor: Tensor) -> tuple[int, int, bool, bool]:
    """Return (owners, users, shared, owned): counts and facts that tell who else holds a tensor or its memory.

    `owners` counts the owners of the C++ object: the Python object, autograd, scripted modules, and views of the
    tensor. `users` counts the users of its memory, `shared` says whether other processes may use the memory, and
    `owned` says whether torch owns the memory. (`shared` is only checked on the CPU; on a GPU, torch says that every
    tensor is shared.)
    """
    storage = tensor.untyped_storage()
    users, shared = torch._C._storage_Use_Count(storage._cdata), tensor.is_cpu and storage.is_shared()
    return tensor._use_count(), users, shared, storage.resizable()  # pyrefly: ignore[missing-attribute]


def tensor_without_memory(kind: type[Tensor], shape: Sequence[int], dtype: torch.dtype, device: Any) -> Any:
    """Return a tensor of a subclass that has a shape but no storage, like a wrapper in "Extending PyTorch"."""
    return Tensor._make_wrapper_subclass(kind, shape, dtype=dtype, device=device)


def module_tables(module: nn.Module, *kinds: str) -> list[dict[str, Any]]:
    """Return a module's own dictionaries of these kinds (`modules`, `parameters`, `buffers`), not its submodules'."""
    return [getattr(module, f"_{kind}") for kind in kinds]


def in_functional_call() -> bool:
    """Return whether `torch.func.functional_call` runs, which lends other parameters to a module."""
    frame: Any = sys._getframe()
    while frame is not None and frame.f_code is not stateless._functional_call.__code__:
        frame = frame.f_back
    return frame is not None


def is_compiled(module: nn.Module) -> bool:
    """Return whether `torch.compile` wraps the module, or was applied to it in place."""
    return type(module).__module__.startswith("torch._dynamo") or is_compiled_in_place(module)


def is_compiled_in_place(module: nn.Module) -> bool:
    """Return whether `module.compile()` was called."""
    return module._compiled_call_impl is not None


# ---- optimizers -------------------------------------------------------------------------


def has_step_hooks(optimizer: Optimizer) -> bool:
    """Return whether hooks run around the optimizer's `step()`: the optimizer's own, or hooks of all optimizers."""
    tables = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")  # not all classes call Optimizer.__init__
    own = any(getattr(optimizer, table, None) for table in tables)
    after = any(not _only_observes(hook) for hook in _global_optimizer_post_hooks.values())
    return bool(own or _global_optimizer_pre_hooks or after)


def _only_observes(hook: Any) -> bool:
    """Return whether a hook belongs to `legato watch`, which only observes steps."""
    return getattr(hook, "only_observes", False)


def observe_step(optimizer: Optimizer) -> None:
    """Let `legato watch` count a step for which torch runs no hooks."""
    if not has_step_hooks(optimizer):
        for hook in _global_optimizer_post_hooks.values():
            hook(optimizer, (), {})


def begins_with_step(optimizer: Any) -> bool:
    """Return whether the optimizer creates a parameter's state in the parameter's first step, with a step counter.

    torch's optimizers do so, except Adagrad.
    """
    return hasattr(optimizer, "_init_group") and not isinstance(optimizer, torch.optim.Adagrad)


def begin_state(optimizer: Any, group: dict[str, Any]) -> None:
    """Create the state of a group's parameters without a step, in an optimizer for which `begins_with_step` is true."""
    names = list(inspect.signature(optimizer._init_group).parameters)
    optimizer._init_group(group, *([] for _ in names[1:]))


def without_step_hooks(attributes: dict[str, Any]) -> dict[str, Any]:
    """Return the attributes of an optimizer (`vars()`), without the hooks on its step."""
    return {**attributes, "_optimizer_step_pre_hooks": {}, "_optimizer_step_post_hooks": {}}


def unhooked_step(base: type[Optimizer]) -> Callable[[Optimizer], Any]:
    """Return the `step` of an optimizer's class, not compiled, and without torch's wrapper for hooks and profiles."""
    step: Any = base.step
    return functools.partial(uncompiled, step.__wrapped__ if hasattr(step, "hooked") else step)


#: The code object of every `step` in torch: all of them are wrapped in the same function, which runs hooks.
_HOOKED: Any = Optimizer.profile_hook_step(lambda _: None).__code__


def is_replaced(base: type[Optimizer]) -> bool:
    """Return whether the program has replaced the `step` of an optimizer's class."""
    return getattr(base.step, "__code__", None) is not _HOOKED


def hooked_step(step: Callable[[Optimizer], None]) -> Callable[[Optimizer], Any]:
    """Return a function that runs `step` with the optimizer's hooks around it."""
    return cast("Callable[[Optimizer], Any]", Optimizer.profile_hook_step(step))


class SubstituteScaler(torch.amp.GradScaler):
    """A `GradScaler` that unscales the gradients of `substitutes(optimizer)`, not of the optimizer itself."""

    def substitutes(self, optimizer: Optimizer) -> Any:
        """Return the object whose `param_groups` have the gradients to unscale."""
        return optimizer

    def found(self, optimizer: Optimizer, found_inf: dict[torch.device, Tensor]) -> None:
        """Handle the numbers in `found_inf` (nonzero if a gradient is infinite or NaN), and change them if needed."""

    def _unscale_grads_(self, optimizer: Any, inv_scale: Any, found_inf: Any, allow_fp16: bool) -> Any:
        found = super()._unscale_grads_(self.substitutes(optimizer), inv_scale, found_inf, allow_fp16)
        self.found(optimizer, found)
        return found


def counts_steps(step: Any) -> bool:
    """Return whether this `step` is a learning-rate scheduler's wrapper, which counts the optimizer's steps."""
    return hasattr(step, "_wrapped_by_lr_sched")


def count_steps(step: Any) -> None:
    """Mark `step`, which calls `note_step`, so that learning-rate schedulers do not wrap it to count its calls."""
    vars(step)["_wrapped_by_lr_sched"] = True


def note_step(optimizer: Optimizer) -> None:
    """Count a step for learning-rate schedulers."""
    vars(optimizer)["_opt_called"] = True


def rebind_step(optimizer: Optimizer, base: type[Optimizer], new: Any) -> None:
    """Make the `step` that a learning-rate scheduler has set on the optimizer call the `step` of the class `new`.

    A scheduler sets a method `step` on the optimizer, to count its calls. If no scheduler has set such a method,
    nothing changes.
    """
    bound = vars(optimizer).get("step")
    if getattr(bound, "__wrapped__", None) is not base.step and not hasattr(bound, "_legato_counts"):
        return

    @functools.wraps(new.step)
    def step(closure: Callable[[], Any] | None = None) -> Any:
        vars(optimizer)["_opt_called"] = True
        return new.step(optimizer, closure)

    vars(step).update(_wrapped_by_lr_sched=True, _legato_counts=True)
    vars(optimizer)["step"] = step


# ---- DistributedDataParallel -----------------------------------------------------------


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


def steps_in_backward(parameter: nn.Parameter) -> bool:
    """Return whether torch's `_apply_optimizer_in_backward` updates the parameter."""
    return hasattr(parameter, "_in_backward_optimizers")


def ignored_parameters(module: nn.Module) -> Any:
    """Return the names of the parameters and buffers that DDP was told to ignore."""
    return getattr(module, "_ddp_params_and_buffers_to_ignore", ())


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


# ---- profilers --------------------------------------------------------------------------


def on_profilers(begins: Callable[[], None], ends: Callable[[], None]) -> None:
    """From now on, call `begins()` before a torch profiler is prepared or enabled, and `ends()` after it ends."""

    def told(name: str, before: Callable[[], None], after: Callable[[], None]) -> None:
        call = getattr(torch.autograd.profiler, name)

        @functools.wraps(call)
        def call_and_tell(*args: Any, **kwargs: Any) -> Any:
            before()
            result = call(*args, **kwargs)
            after()
            return result

        setattr(torch.autograd.profiler, name, call_and_tell)

    def nothing() -> None:
        pass

    told("_prepare_profiler", begins, nothing)
    told("_enable_profiler", begins, nothing)
    told("_disable_profiler", nothing, ends)


# ---- process groups ---------------------------------------------------------------------


#: The part of a store that has keys with a prefix. The class is public, but `torch.distributed` does not export it
#: explicitly.
PrefixStore: Any = dist.PrefixStore


def default_store() -> Any:
    """Return the store through which `init_process_group` has connected the ranks."""
    return _get_default_store()


def group_timeout(group: Any, device: torch.device) -> timedelta:
    """Return the timeout of the group's collectives on tensors of this device."""
    return cast(timedelta, group._get_backend(device).options._timeout)


def own_group(group: Any, name: str, timeout: timedelta) -> Any:
    """Return a new process group with the ranks and the backend of `group`, whose members alone make it.

    `name` must be the same on all members, and must never have been used in this job. torch makes the names of the
    program's groups from the number of groups that each rank has made or knows, so torch is not told about this one.
    (`dist.new_group` would count it, and then a later group of the program could have different names on its ranks.)
    """
    ranks, everyone, world = dist.get_process_group_ranks(group), _get_default_group(), cast(Any, _world)
    bound, everyone.bound_device_id = everyone.bound_device_id, None  # otherwise ranks that are no members must help
    try:
        own: Any = _new_process_group_helper(
            len(ranks), group.rank(), ranks, world.pg_map[group][0], default_store(), cast(Any, name), timeout=timeout
        )[0]
    finally:
        everyone.bound_device_id = bound
    for table in (world.pg_map, world.pg_names, world.pg_backend_config, world.pg_group_ranks):
        table.pop(own, None)
    for groups in (world.tags_to_pg.pop(world.pg_to_tag.pop(own)), world.tags_to_pg.get("", [])):
        if own in groups:
            groups.remove(own)
    _unregister_process_group(cast(Any, name))
    return own


def new_gloo(store: Any, rank: int, ranks: int, timeout: timedelta, interfaces: list[str]) -> Any:
    """Return a gloo backend with one thread, outside any process group.

    The backend uses the network interfaces in `interfaces`, or the default interface if there are none.
    """
    backend: Any = dist.ProcessGroupGloo
    options = backend._Options()
    options._threads = 1
    options._timeout = timeout
    devices = [backend.create_device(interface=name) for name in interfaces]
    options._devices = devices or [backend.create_default_device()]
    return backend(store, rank, ranks, options)
