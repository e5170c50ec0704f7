"""Everything that legato uses of torch's private interfaces, as of torch 2.11 to 2.15.

No other file names an attribute or a module of torch that begins with an
underscore, so a new version of torch is checked here. Each entry says what it is
for, and what could replace it.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from typing import Any, Literal, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors
from torch.distributed.distributed_c10d import _get_default_store, _world
from torch.distributed.utils import _to_kwargs
from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

__all__ = [
    "PRIVATE_METADATA",
    "DispatchMode",
    "PrefixStore",
    "anybody_sends",
    "autograd_node_number",
    "backend_name",
    "check_comm_hook",
    "checkpoint_name",
    "comm_hooks",
    "common_rank",
    "compile_graphs",
    "compiled_by",
    "compiled_module",
    "compiles_with",
    "copy_all",
    "current_node",
    "current_node_number",
    "default_store",
    "flatten_tensors",
    "group_is_alive",
    "group_timeout",
    "has_forward_hooks",
    "has_gradient_hooks",
    "has_step_hooks",
    "ignored_parameters",
    "in_backward_pass",
    "is_compiled",
    "is_compiled_in_place",
    "is_joining",
    "is_left_to_eager_mode",
    "is_whole_frame",
    "keeps_its_reducer",
    "leaves",
    "mark_as_hooked",
    "memory_uses",
    "module_tables",
    "moved_inputs",
    "multiply_all",
    "new_gloo",
    "no_gradients",
    "not_compiled",
    "on_backward_end",
    "on_compilation",
    "operator_schema",
    "outside_transforms",
    "rebind_step",
    "remove_reducer",
    "share_final_model",
    "storage_id",
    "tensor_without_memory",
    "unflatten_tensors",
    "unhooked_step",
    "uses",
    "version_of",
    "will_run",
    "without_dispatch_modes",
    "without_overrides",
    "without_step_hooks",
]

# ---- dispatch, overrides, compilation ---------------------------------------------------

#: Keeps dynamo from tracing a function. `torch.compiler.disable` does the same, but imports dynamo right away (1 s).
not_compiled: Any = torch._disable_dynamo  # type: ignore[attr-defined]

#: Inside, `__torch_function__` of tensor subclasses is not called. (torch documents it, under `torch._C` only.)
without_overrides: Any = torch._C.DisableTorchFunctionSubclass

#: All leaves of nested lists, tuples, dicts and registered classes. `torch.utils.pytree` will be the public one.
leaves: Callable[[Any], list[Any]] = tree_leaves


@contextmanager
def on_compilation(call: Callable[[], None]) -> Iterator[None]:
    """Inside, call `call()` whenever dynamo begins to compile something."""
    from torch._dynamo.callback import callback_handler

    def started(_: Any) -> None:
        compiling, torch.compiler._is_compiling_flag = torch.compiler._is_compiling_flag, False
        try:  # optimizers compute otherwise where this flag is set
            call()
        finally:
            torch.compiler._is_compiling_flag = compiling

    callback_handler.register_start_callback(started)
    try:
        yield
    finally:
        if started in callback_handler.start_callbacks:  # `torch.compiler.reset()` removes all
            callback_handler.remove_start_callback(started)


@not_compiled(recursive=False)  # type: ignore[untyped-decorator]
def compiled_by(frame: Any) -> Literal["", "module", "caller"]:
    """Whether dynamo compiles what this frame calls, a module's `forward`.

    It does because `torch.compile` was given the module (`module`), or because
    compiled code calls it (`caller`).
    """
    if torch._C._dynamo.eval_frame.get_eval_frame_callback() in (None, False):
        return ""
    caller = frame.f_back
    while caller.f_code.co_filename == nn.modules.module.__file__:
        caller = caller.f_back
    return "module" if caller.f_globals.get("__name__", "").startswith("torch._dynamo") else "caller"


@contextmanager
def compiles_with(compile_graph: Callable[[Any, Any, Any], Any], ddp: Any = None) -> Iterator[None]:
    """Inside, dynamo calls `compile_graph(backend, graph, inputs)` for each graph.

    This is the forward pass of `ddp`, if one is given. If `compile_graph`
    returns None, dynamo does what it does for a DDP: it splits the graph by
    `DDPOptimizer`, whose place is taken here.
    """
    if "torch._dynamo" in sys.modules:
        _take_place_of_ddp_optimizer()
    active: Any = nn.parallel.DistributedDataParallel
    before = active._active_ddp_module
    active._active_ddp_module = _Active(compile_graph, getattr(ddp, "bucket_bytes_cap", 2**62))
    try:
        yield
    finally:
        active._active_ddp_module = before


class _Active(NamedTuple):
    """What dynamo finds in place of the DDP whose forward pass runs."""

    compile_graph: Callable[[Any, Any, Any], Any]
    bucket_bytes_cap: int


@functools.cache
def _take_place_of_ddp_optimizer() -> None:
    from torch._dynamo.backends import distributed

    class Optimizer(distributed.DDPOptimizer):
        def compile_fn(self, gm: Any, example_inputs: Any, **options: Any) -> Any:
            active = cast(Any, nn.parallel.DistributedDataParallel)._get_active_ddp_module()
            if isinstance(active, _Active) and not options:
                compiled = active.compile_graph(self.backend_compile_fn, gm, example_inputs)
                if compiled is not None:
                    return compiled
            return super().compile_fn(gm, example_inputs, **options)

    distributed.DDPOptimizer = Optimizer  # type: ignore[misc]


def compiled_module(module: nn.Module) -> nn.Module:
    """The module whose calls `torch.compile` compiles, if it was given this one."""
    return cast(nn.Module, getattr(module, "_orig_mod", module))


def has_forward_hooks(module: nn.Module) -> bool:
    """Whether the user's hooks run around the module's `forward`, its own or those of all modules."""
    of_all = nn.modules.module
    return bool(
        module._forward_hooks or module._forward_pre_hooks or of_all._global_forward_hooks
        or of_all._global_forward_pre_hooks
    )  # fmt: skip


def is_whole_frame(graph: Any, function: Any) -> bool:
    """Whether dynamo has traced all of a call of `function` (a bound method) into this graph, without a graph break."""
    code, reason = getattr(function, "__code__", None), getattr(graph, "compile_subgraph_reason", None)
    if code is None or reason is None or reason.graph_break or not reason.user_stack:
        return False
    frame = reason.user_stack[0]
    return (frame.filename, frame.name) == (code.co_filename, code.co_name) and frame.lineno >= code.co_firstlineno


def is_left_to_eager_mode(function: Any) -> bool:
    """Whether dynamo may run a compiled function (a bound method) without compiling it, and without saying so.

    It does so beyond the limit of recompilations, and where `torch.compiler.set_stance` tells it to.
    """
    from torch._dynamo import config, eval_frame

    entries = torch._C._dynamo.eval_frame._debug_get_cache_entry_list(function.__code__)
    return len(entries) >= config.recompile_limit or eval_frame._stance.stance != "default"


def backend_name(backend: Any) -> str:
    """The name of a backend of `torch.compile`, of which dynamo hands out wrappers."""
    from torch._dynamo.eval_frame import innermost_backend

    innermost = innermost_backend(backend)
    return str(getattr(innermost, "compiler_name", None) or getattr(innermost, "__name__", innermost))


def compile_graphs(backend: Any, graph: Any, inputs: Any, function_of: Callable[..., Any]) -> Any:
    """Compile a graph as the backend does, but for the forward and backward graphs that AOTAutograd makes of it.

    Each becomes `function_of(phase, graph, inputs, compile_piece)`, where phase
    is `forward` or `backward`, and `compile_piece(graph, inputs, whole)` compiles it as the
    backend does, or a part of it; it also returns what results the part has for inputs like these
    (of the whole graph: nothing). None if the backend is neither `inductor` nor `aot_eager`.
    """
    from torch._dynamo.backends.debugging import aot_eager, boxed_nop
    from torch._dynamo.eval_frame import innermost_backend
    from torch._functorch import config

    backend = innermost_backend(backend)
    # What autograd's cache holds was not cut, and a buffer that a whole graph may reuse is read by a later piece.
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
            chosen, results = options, []
            with config.patch(patches), V.set_fake_mode(fake_mode), torch._guards.tracing(context):
                if not whole:
                    chosen = {**options, "static_input_idxs": (), "cudagraphs": BoxedBool(False)}
                    # Convolutions may have changed the layout of what this piece reads. inductor does the same first.
                    view_to_reshape(piece)  # type: ignore[no-untyped-call]
                    results = FakeTensorProp(piece, fake_mode).propagate_dont_convert_inputs(*inputs)
                    # The next piece is compiled for the strides of these.
                    piece.graph.output_node().meta["user_visible_output_idxs"] = range(len(results))
                return compile_fx_inner(piece, inputs, **chosen), results

        return function_of("backward" if options.get("is_backward") else "forward", graph, inputs, compile_piece)

    return compile_fx(graph, inputs, inner_compile=inner, config_patches=patches)


class DispatchMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees every operator below autograd, and those of compiled code; dynamo compiles under it as without it.

    The documentation of dispatch modes ("Extending PyTorch") gives this private path.
    """

    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True


def without_dispatch_modes() -> Any:
    """A context in which no dispatch mode of the user sees an operator; without one, it costs nothing."""
    return _disable_current_modes() if torch._C._len_torch_dispatch_stack() else nullcontext()


def outside_transforms() -> Any:
    """A context outside all active transforms of `torch.func` and `torch.jit.trace`; without any, it costs nothing."""
    tracing = torch._C._get_tracing_state()
    transforming = torch._C._functorch.peek_interpreter_stack() is not None
    return _outside_transforms(tracing, transforming) if tracing or transforming else nullcontext()


@contextmanager
def _outside_transforms(tracing: Any, transforming: bool) -> Iterator[None]:
    from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

    torch._C._set_tracing_state(None)  # type: ignore[attr-defined]
    try:
        with temporarily_clear_interpreter_stack() if transforming else nullcontext():
            yield
    finally:
        torch._C._set_tracing_state(tracing)  # type: ignore[attr-defined]


def operator_schema(func: Any) -> Any:
    """The schema of an `OpOverload`; None for a higher-order operator."""
    return getattr(func, "_schema", None)


# ---- autograd ---------------------------------------------------------------------------


def on_backward_end(call: Callable[[], None]) -> None:
    """Call `call()` when the backward pass that runs now has ended (DDP finalizes its buckets in the same way)."""
    torch.autograd.Variable._execution_engine.queue_callback(call)  # type: ignore[attr-defined]


class no_gradients:
    """`torch.no_grad()` at a fraction of its cost; it can be entered once."""

    __slots__ = ("_before",)

    def __enter__(self) -> None:
        self._before = torch.is_grad_enabled()
        torch._C._set_grad_enabled(False)

    def __exit__(self, *error: Any) -> None:
        torch._C._set_grad_enabled(self._before)


def in_backward_pass() -> bool:
    """Whether autograd runs a backward pass on this thread."""
    return torch._C._current_graph_task_id() != -1


def autograd_node_number() -> int:
    """The number that autograd gives to the next node that this thread creates."""
    return int(torch.autograd._get_sequence_nr())  # type: ignore[attr-defined]


def current_node() -> Any:
    """The node that the backward pass runs now on this thread; None outside one."""
    return torch._C._current_autograd_node()


def will_run(node: Any) -> bool:
    """Whether the backward pass that runs now will reach this node, or has reached it."""
    return torch._C._will_engine_execute_node(node)


def current_node_number() -> int | None:
    """The number of the node that the backward pass runs now; None outside one. 2**63 and more: AccumulateGrad."""
    node = torch._C._current_autograd_node()
    return None if node is None else int(node._sequence_nr())


# ---- tensors and modules ----------------------------------------------------------------


#: Attributes of a tensor that say nothing about its values.
PRIVATE_METADATA = ("_version", "_backward_hooks", "_post_accumulate_grad_hooks")


def version_of(tensor: Tensor) -> int:
    """How often the tensor was changed in place; changes through `.data` are not counted."""
    return tensor._version


def has_gradient_hooks(parameter: nn.Parameter) -> bool:
    """Whether the user has registered hooks on the parameter's gradient."""
    return bool(parameter._backward_hooks) or bool(parameter._post_accumulate_grad_hooks)  # type: ignore[attr-defined]


def storage_id(storage: torch.UntypedStorage) -> int:
    """The address of a storage's C++ object: unlike that of its memory, no other live storage has it."""
    return int(storage._cdata)


def copy_all(targets: list[Tensor], sources: list[Tensor]) -> None:
    """Copy many tensors, of the same shapes, in one call; torch's optimizers are made of such calls."""
    torch._foreach_copy_(targets, sources)


def multiply_all(tensors: list[Tensor], factor: float) -> None:
    """Multiply many tensors by a number, in place, in one call."""
    torch._foreach_mul_(tensors, factor)


def memory_uses(tensor: Tensor) -> int:
    """How many tensors and storages share the tensor's memory; one of them is made for asking."""
    return int(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata))


def uses(tensor: Tensor) -> tuple[int, int, bool]:
    """The owners of a tensor's C++ object, the users of its memory, and whether these may be other processes.

    Owners are Python's object, autograd, scripted modules, and views of it.
    (Other processes are asked for on the CPU only: on a GPU, torch says yes of every tensor.)
    """
    storage = tensor.untyped_storage()
    return tensor._use_count(), torch._C._storage_Use_Count(storage._cdata), tensor.is_cpu and storage.is_shared()  # type: ignore[attr-defined]


def flatten_tensors(tensors: list[Tensor]) -> Tensor:
    """Dense tensors of one dtype, copied into a flat one; DDP and FSDP use this too."""
    return cast(Tensor, _flatten_dense_tensors(tensors))  # type: ignore[no-untyped-call]


def unflatten_tensors(flat: Tensor, like: list[Tensor]) -> list[Tensor]:
    """Views of a flat tensor that are shaped like the tensors from which it was made."""
    return list(_unflatten_dense_tensors(flat, like))  # type: ignore[no-untyped-call]


def tensor_without_memory(kind: type[Tensor], shape: Sequence[int], dtype: torch.dtype, device: Any) -> Any:
    """A tensor of a subclass that has a shape and no storage ("Extending PyTorch" makes wrappers in this way)."""
    return Tensor._make_wrapper_subclass(kind, shape, dtype=dtype, device=device)  # type: ignore[attr-defined]


def checkpoint_name(model: nn.Module, name: str) -> str:
    """The name that `torch.distributed.checkpoint.state_dict` gives a parameter: without those of its wrappers."""
    from torch.distributed.checkpoint.state_dict import _get_fqns

    return next(iter(_get_fqns(model, name)))


def module_tables(module: nn.Module, *kinds: str) -> list[dict[str, Any]]:
    """A module's own dictionaries of these kinds (`modules`, `parameters`, `buffers`), not those of its children."""
    return [getattr(module, f"_{kind}") for kind in kinds]


def is_compiled(module: nn.Module) -> bool:
    """Whether `torch.compile` wraps the module, or was applied to it in place."""
    return type(module).__module__.startswith("torch._dynamo") or is_compiled_in_place(module)


def is_compiled_in_place(module: nn.Module) -> bool:
    """Whether `module.compile()` was called."""
    return module._compiled_call_impl is not None


# ---- optimizers -------------------------------------------------------------------------


def has_step_hooks(optimizer: Optimizer) -> bool:
    """Whether hooks run around the optimizer's `step()`, its own or those of all optimizers."""
    tables = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")  # not all classes call Optimizer.__init__
    own = any(getattr(optimizer, table, None) for table in tables)
    return bool(own or _global_optimizer_pre_hooks or _global_optimizer_post_hooks)


def without_step_hooks(attributes: dict[str, Any]) -> dict[str, Any]:
    """The attributes of an optimizer (`vars()`), with no hooks on its step."""
    return {**attributes, "_optimizer_step_pre_hooks": {}, "_optimizer_step_post_hooks": {}}


def unhooked_step(base: type[Optimizer]) -> Callable[[Optimizer], Any]:
    """The `step` of an optimizer's class without the wrapper with which torch runs hooks and profiles."""
    step: Any = base.step
    return cast("Callable[[Optimizer], Any]", step.__wrapped__ if hasattr(step, "hooked") else step)


def hooked_step(step: Callable[[Optimizer], None]) -> Callable[[Optimizer], Any]:
    """A function that steps, with the hooks of the optimizer around it."""
    return cast("Callable[[Optimizer], Any]", Optimizer.profile_hook_step(step))


class SubstituteScaler(torch.amp.GradScaler):
    """A `GradScaler` that may unscale other parameters than those of the optimizer."""

    def substitutes(self, optimizer: Optimizer) -> Any:
        """What has the `param_groups` whose gradients are unscaled."""
        return optimizer

    def found(self, optimizer: Optimizer, found_inf: dict[torch.device, Tensor]) -> None:
        """Called with the numbers that are not 0 where a gradient is infinite or NaN, which may be changed."""

    def _unscale_grads_(self, optimizer: Any, inv_scale: Any, found_inf: Any, allow_fp16: bool) -> Any:
        found = super()._unscale_grads_(self.substitutes(optimizer), inv_scale, found_inf, allow_fp16)
        self.found(optimizer, found)
        return found


def mark_as_hooked(step: Any) -> None:
    """Keep torch from wrapping this `step` in hooks when a state is loaded: the one that it calls has them already."""
    vars(step)["hooked"] = True


def rebind_step(optimizer: Optimizer, base: type[Optimizer], new: Any) -> None:
    """Replace the `step` that a learning-rate scheduler has bound to the optimizer by that of its `new` class.

    A scheduler stores a bound method in the optimizer, to count its calls.
    Without one, nothing is changed.
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


def remove_reducer(ddp: Any) -> None:
    """Remove DDP's own reducer, with its hooks on the parameters and its buckets."""
    ddp.reducer._remove_autograd_hooks()
    ddp.logger = None  # it holds the reducer too
    ddp.reducer = None


def keeps_its_reducer(ddp: Any) -> str:
    """What a user's DDP has been told that only its own reducer can do; empty if nothing."""
    options = {
        "mixed_precision": ddp.mixed_precision,
        "delay_all_reduce_named_params": ddp._delay_all_reduce_params,
        "a built-in communication hook": not ddp._comm_hooks and ddp._get_ddp_logging_data().get("comm_hook"),
        "a communication hook for buffers": hasattr(ddp, "buffer_hook"),
    }
    return ", ".join(name for name, value in options.items() if value)


def check_comm_hook(ddp: Any, hook: Any) -> None:
    """Raise the error of DDP for a communication hook that it refuses."""
    ddp._check_comm_hook(hook)


def comm_hooks(ddp: Any) -> list[tuple[Callable[..., Any], object]]:
    """The communication hooks that were registered, with their states; the list itself."""
    return cast("list[tuple[Callable[..., Any], object]]", ddp._comm_hooks)


def ignored_parameters(module: nn.Module) -> Any:
    """The names of the parameters and buffers that DDP was told to ignore."""
    return getattr(module, "_ddp_params_and_buffers_to_ignore", ())


def is_joining(ddp: Any) -> bool:
    """Whether the model is inside `join()`, where ranks may run out of batches."""
    return bool(ddp._join_config.enable)


def anybody_sends(ddp: Any, joined: bool) -> bool:
    """Inside `join()`: whether the ranks that still train send in this iteration; known to the `joined` ranks."""
    return bool(ddp._check_global_requires_backward_grad_sync(is_joined_rank=joined))


def common_rank(ddp: Any, active: bool) -> int:
    """Inside `join()`: a rank, of those that call this as `active`, on which all ranks agree."""
    return int(ddp._find_common_rank(dist.get_rank(ddp.process_group), active))


def share_final_model(ddp: Any, is_last_joiner: bool) -> None:
    """At the end of `join()`: give all ranks the parameters and buffers of a rank that joined last."""
    ddp._sync_final_model(is_last_joiner)


def moved_inputs(ddp: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
    """The inputs of a forward pass on the device of `device_ids`, if DDP has one."""
    if not ddp.device_ids:
        return args, kwargs
    device = torch.device(ddp.device_type, ddp.device_ids[0])
    moved = _to_kwargs(args, kwargs, device, ddp.use_side_stream_for_tensor_copies)
    return moved[0][0], moved[1][0]


# ---- process groups ---------------------------------------------------------------------


#: A part of a store, for keys with a prefix. It is public, but `torch.distributed` does not export it explicitly.
PrefixStore: Any = dist.PrefixStore  # type: ignore[attr-defined]


def default_store() -> Any:
    """The store of the job, through which `init_process_group` has connected the ranks."""
    return _get_default_store()


def group_timeout(group: Any, device: torch.device) -> timedelta:
    """After how long a collective of the group on such tensors fails."""
    return cast(timedelta, group._get_backend(device).options._timeout)


def group_is_alive(group: Any) -> bool:
    """Whether the group was not destroyed yet."""
    return group in _world.pg_map


def new_gloo(store: Any, rank: int, ranks: int, timeout: timedelta, interfaces: list[str]) -> Any:
    """A gloo backend with one thread, outside any process group, on these network interfaces (none: the default)."""
    backend: Any = dist.ProcessGroupGloo
    options = backend._Options()
    options._threads = 1
    options._timeout = timeout
    devices = [backend.create_device(interface=name) for name in interfaces]
    options._devices = devices or [backend.create_default_device()]
    return backend(store, rank, ranks, options)
