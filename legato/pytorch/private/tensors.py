"""Tensors and modules, and what sees their operators: dispatch modes, overrides, transforms, autograd, profilers."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch._functorch import eager_transforms, vmap
from torch.nn.utils import stateless
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

__all__ = [
    "PRIVATE_METADATA",
    "TRANSFORMS",
    "DispatchMode",
    "autograd_node_number",
    "copy_all",
    "current_node",
    "current_node_number",
    "drop_accumulator",
    "has_forward_hooks",
    "has_gradient_hooks",
    "hooks_on",
    "in_backward_pass",
    "in_functional_call",
    "invisible",
    "leaves",
    "memory_uses",
    "module_tables",
    "multiply_all",
    "on_profilers",
    "operator_schema",
    "outside_transforms",
    "storage_id",
    "tensor_without_memory",
    "uses",
    "version_of",
    "will_run",
    "without_dispatch_modes",
    "without_overrides",
]

# ---- dispatch, overrides, transforms, profilers ----------------------------------------


#: A context in which `__torch_function__` of tensor subclasses is not called. (torch documents it, but only under
#: `torch._C`.)
without_overrides: Any = torch._C.DisableTorchFunctionSubclass


#: A function that returns all leaves of nested lists, tuples, dicts and registered classes. `torch.utils.pytree` will
#: be its public module.
leaves: Callable[[Any], list[Any]] = tree_leaves


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


#: The functions through which the transforms of `torch.func` take in tensors: names, by module.
TRANSFORMS: dict[Any, tuple[str, ...]] = {
    eager_transforms: ("_wrap_tensor_for_grad",),
    vmap: ("_add_batch_dim",),
}


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


# ---- autograd --------------------------------------------------------------------------


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


# ---- tensors ---------------------------------------------------------------------------


#: Attributes of a tensor that say nothing about its values.
PRIVATE_METADATA = ("_version", "_backward_hooks", "_post_accumulate_grad_hooks")


def version_of(tensor: Tensor) -> int:
    """Return how often the tensor was changed in place; changes through `.data` are not counted."""
    return tensor._version


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


# ---- modules ---------------------------------------------------------------------------


def module_tables(module: nn.Module, *kinds: str) -> list[dict[str, Any]]:
    """Return a module's own dictionaries of these kinds (`modules`, `parameters`, `buffers`), not its submodules'."""
    return [getattr(module, f"_{kind}") for kind in kinds]


def has_forward_hooks(module: nn.Module) -> bool:
    """Return whether the user's hooks run around the module's `forward`: hooks on this module or on all modules."""
    of_all = nn.modules.module
    return bool(
        module._forward_hooks or module._forward_pre_hooks or of_all._global_forward_hooks
        or of_all._global_forward_pre_hooks
    )  # fmt: skip


def in_functional_call() -> bool:
    """Return whether `torch.func.functional_call` runs, which lends other parameters to a module."""
    frame: Any = sys._getframe()
    while frame is not None and frame.f_code is not stateless._functional_call.__code__:
        frame = frame.f_back
    return frame is not None
