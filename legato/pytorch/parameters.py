"""Names the parameters of a model whose gradients are averaged, and detects changes of the model.

[Note: names] The same model may be compiled, as a whole or in parts, or wrapped in a `DistributedDataParallel`.
Wrappers do not appear in the names of parameters. So a plan, a workload or a checkpoint that was made for one of these
forms of a model fits all its other forms. `named_parameters` makes all names.

[Note: fingerprint] The parameters of a model may be replaced, for a call (`torch.func.functional_call`) or for good.
When a parameter is cast or moved, it loses DDP's hooks, and does not regain them if it is cast or moved back
(pytorch#104336). When a parameter has been replaced, cast or moved, DDP runs all passes without legato, so the results
are DDP's. Before each forward pass, all parameters and the dictionaries of all modules are compared with their first
state. The comparison takes some tens of microseconds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import chain
from typing import Any

from torch import nn
from torch.autograd.graph import get_gradient_edge

from legato.pytorch.private.ddp import ignored_parameters
from legato.pytorch.private.dynamo import is_compiled, is_compiled_in_place, wrapped_module
from legato.pytorch.private.tensors import drop_accumulator, hooks_on, module_tables, will_run, without_overrides

__all__ = [
    "ModuleFingerprint",
    "OwnHook",
    "named_modules",
    "named_parameters",
    "sparse_parameters",
    "trained_parameters",
]


def named_modules(model: nn.Module) -> dict[str, nn.Module]:
    """Return a model and its submodules by the names that they have without wrappers; the model's own name is "".

    A wrapper (`torch.compile`, `DistributedDataParallel`) is left out, and the wrapped module gets the wrapper's name.
    """
    return dict(_without_wrappers(model).values())


def named_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return a model's parameters by the names that they have without wrappers; a shared parameter appears once."""
    return {name: p for _, name, p in _named(model)}


def _named(model: nn.Module) -> Iterator[tuple[str, str, nn.Parameter]]:
    """Yield torch's name of each parameter, its name without wrappers, and the parameter."""
    modules = _without_wrappers(model)
    for full, p in model.named_parameters():
        parent = full.rpartition(".")[0]
        while parent not in modules:  # the parameter's own name has a dot
            parent = parent.rpartition(".")[0]
        yield full, _joined(modules[parent][0], full.removeprefix(f"{parent}.")), p


def _without_wrappers(model: nn.Module) -> dict[str, tuple[str, nn.Module]]:
    """Return, by torch's name of each module, the pair of the module's name without wrappers and the module."""
    found: dict[str, tuple[str, nn.Module]] = {}
    for full, module in model.named_modules():
        parent, _, leaf = full.rpartition(".")
        outer, around = found.get(parent, ("", None)) if full else ("", None)
        wrapped = around is not None and wrapped_module(around) is module
        found[full] = outer if wrapped else _joined(outer, leaf), module
    return found


def _joined(path: str, name: str) -> str:
    return f"{path}.{name}" if path and name else path or name


def trained_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters with dense gradients, by name; a shared parameter appears once.

    Left out are empty parameters, parameters that DDP was told to ignore, and parameters that `sparse_parameters`
    returns.
    """
    sparse, ignored = sparse_parameters(module), ignored_parameters(module)
    return {
        name: p
        for full, name, p in _named(module)
        if p.requires_grad and p.numel() and full not in ignored and name not in sparse
    }


def sparse_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """Return the weights of embeddings that were made with `sparse=True`, by name.

    Weights that other modules share are left out, because their gradients are dense.
    """
    weights: set[int] = set()
    others: set[int] = set()
    for m in module.modules():
        sparse = isinstance(m, nn.Embedding | nn.EmbeddingBag) and m.sparse
        (weights if sparse else others).update(map(id, m.parameters(recurse=False)))
    if not weights:
        return {}
    ignored = ignored_parameters(module)
    return {
        name: p
        for full, name, p in _named(module)
        if id(p) in weights and id(p) not in others and p.requires_grad and full not in ignored
    }


class OwnHook(partial[Any]):
    """A hook of legato's that runs after an addition to a gradient, or one that runs hooks of the program there."""


class ModuleFingerprint:
    """The modules and parameters of a model at the time of creation."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._note_modules()
        parameters = named_parameters(module)
        self._kinds = [(name, p, p.dtype, p.device) for name, p in parameters.items()]
        self._memory = {name: p.data_ptr() for name, p in parameters.items()}
        self._accumulators = {
            name: get_gradient_edge(p).node for name, p in parameters.items() if p.requires_grad and p.is_leaf
        }
        self._hooks = {name: hooks_on(node) for name, node in self._accumulators.items()}
        self._compiled = any(map(is_compiled, self._modules))

    def _note_modules(self) -> None:
        self._modules = list(self._module.modules())
        tables: list[dict[str, Any]] = [t for m in self._modules for t in module_tables(m, "modules", "parameters")]
        self._tables = [(table, list(table.values())) for table in tables if table]
        self._empty = [table for table in tables if not table]

    def difference(self) -> str:
        """Describe what has changed since creation (a parameter was cast, moved or replaced), or return "".

        A rank may add and replace modules alone, as long as all parameters stay in place.
        """
        with without_overrides():
            for name, p, dtype, device in self._kinds:
                moved = p.data_ptr() != self._memory[name]
                self._memory[name] = p.data_ptr()
                if moved and self._has_lost_hooks(name, p):
                    return f"{name} was cast or moved, and DDP no longer averages its gradients (pytorch#104336)"
                if p.dtype is not dtype or p.device != device:
                    return f"{name} was cast or moved"
        if any(self._empty) or any(
            len(table) != len(before) or any(a is not b for a, b in zip(table.values(), before, strict=True))
            for table, before in self._tables
        ):
            there = named_parameters(self._module)
            if any(there.get(name) is not p for name, p, *_ in self._kinds):
                return "the model has other parameters now"
            self._note_modules()
        return ""

    def hooked(self) -> str:
        """Describe hooks of the program that run after additions to gradients, as DDP's own do, or return "".

        Hooks that `hooks_last` has put in their places are left out.
        """
        found = chain.from_iterable(hooks.values() for hooks in self._hooks.values())
        return "hooks run after additions to its gradients" if any(type(h) is not OwnHook for h in found) else ""

    @contextmanager
    def hooks_last(self) -> Iterator[None]:
        """Let such hooks of the program run after the hooks that DDP registers in this context.

        A node runs C++ hooks in the order of their registration, and all its Python hooks together, in the first one's
        place. So DDP gets new nodes. Call this when no hooks of legato's are left.
        """
        parameters = {name: p for name, p, *_ in self._kinds if p.requires_grad and not self._has_lost_hooks(name, p)}
        hooked = {name: self._hooks.pop(name) for name in list(self._hooks) if self._hooks[name]}
        for name in hooked.keys() & parameters:
            drop_accumulator(parameters[name])
        yield
        for name in hooked.keys() & parameters:
            node = self._accumulators[name] = get_gradient_edge(parameters[name]).node
            node.register_hook(OwnHook(_run_all, hooked[name]))
            self._hooks[name] = hooks_on(node)

    def keep_nodes(self) -> None:
        """Let `hooks_last` replace no nodes from now on, because another DDP has its hooks on them."""
        self._hooks.clear()

    def accumulates(self) -> bool:
        """Return whether the running backward pass adds to the gradient of any parameter."""
        return any(map(will_run, self._accumulators.values()))

    def without_hooks(self) -> list[nn.Parameter]:
        """Return the parameters that have lost the hooks that DDP had registered on them."""
        return [p for name, p, _, _ in self._kinds if self._has_lost_hooks(name, p)]

    def _has_lost_hooks(self, name: str, parameter: nn.Parameter) -> bool:
        before = self._accumulators.get(name)
        with without_overrides():
            return before is not None and parameter.requires_grad and get_gradient_edge(parameter).node is not before

    def compiled(self) -> bool:
        """Return whether `torch.compile` was applied to any of the modules."""
        return self._compiled or any(map(is_compiled_in_place, self._modules))


def _run_all(hooks: dict[int, Callable[..., Any]], *args: Any) -> None:
    for hook in list(hooks.values()):
        hook(*args)
