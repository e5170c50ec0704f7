"""torch's compilers: dynamo, the backends that it calls, and TorchScript."""

from __future__ import annotations

import copy
import functools
import logging
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any, Literal, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from legato.pytorch.private.tensors import in_backward_pass, storage_id

__all__ = [
    "backend_name",
    "compile_graphs",
    "compiled_by",
    "compiled_module",
    "compiles_two_ways",
    "compiles_with",
    "is_compiled",
    "is_compiled_in_place",
    "is_left_to_eager_mode",
    "is_whole_frame",
    "not_compiled",
    "on_compilation",
    "runs_compiled",
    "scripted_as",
    "uncompiled",
    "wrapped_module",
]

_log = logging.getLogger("legato")

#: A decorator that keeps dynamo from compiling a function, and all that it calls. `torch.compiler.disable` does the
#: same, but imports dynamo right away (1 s).
not_compiled: Any = torch._disable_dynamo


@not_compiled
def uncompiled(call: Callable[..., Any], *args: Any) -> Any:
    """Call `call(*args)`, and let dynamo compile nothing in it."""
    return call(*args)


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


def is_compiled(module: nn.Module) -> bool:
    """Return whether `torch.compile` wraps the module, or was applied to it in place."""
    return type(module).__module__.startswith("torch._dynamo") or is_compiled_in_place(module)


def is_compiled_in_place(module: nn.Module) -> bool:
    """Return whether `module.compile()` was called."""
    return module._compiled_call_impl is not None


def compiled_module(module: nn.Module) -> nn.Module:
    """Return the module that `torch.compile` has wrapped in this one, or the module itself."""
    return cast(nn.Module, getattr(module, "_orig_mod", module))


def wrapped_module(module: nn.Module) -> nn.Module | None:
    """Return the module that `torch.compile` or DDP has wrapped in this one; None if this is not a wrapper."""
    if isinstance(module, nn.parallel.DistributedDataParallel):
        return cast(nn.Module, module.module)
    return cast(nn.Module, module._orig_mod) if type(module).__module__.startswith("torch._dynamo") else None


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


def scripted_as(function: Any, like: Any) -> None:
    """Make `torch.jit.script` replace `function` by `like` in calls. `function` must never be deleted."""
    table: Any = torch.jit._builtins
    operator = table._find_builtin(like)
    if operator is not None:
        table._register_builtin(function, operator)


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
