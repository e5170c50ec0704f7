"""Observes what `fully_shard` must know about a model's modules, during one training step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from legato.core.workload import Module, Parameter
from legato.pytorch.parameters import named_modules
from legato.pytorch.private.tensors import DispatchMode, in_backward_pass, leaves, storage_id

__all__ = ["ModuleObserver"]


class ModuleObserver:
    """Watches one step through hooks and a dispatch mode, and then describes the modules (`modules`).

    The operators of the backward pass show which parameters this pass reads. Two more kinds of parameters count as read
    in the backward pass: parameters of modules that activation checkpointing calls again, and parameters that autocast
    copies in another precision in the forward pass. (The backward pass reads these copies; without autocast it would
    read the parameters.)
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        everything = named_modules(model)
        self._named = {path: place for place, path in enumerate(everything)}
        self._modules = {path: module for path, module in everything.items() if any(True for _ in module.parameters())}
        self._calls: Counter[str] = Counter()  # in the order of the first calls
        self._needs_gradient: set[str] = set()
        self._reached: set[str] = set()
        self._differentiable: set[str] = set()
        self._read: set[int] = set()  # ids of the storages that the backward pass reads

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Watch one forward and one backward pass, which run inside this context."""
        with ExitStack() as stack:
            for path, module in self._modules.items():
                self._hook(path, module, stack)
            stack.enter_context(_Reads({_storage(p) for p in self._model.parameters()}, self._read))
            yield

    def _hook(self, path: str, module: nn.Module, stack: ExitStack) -> None:
        def begins(_module: nn.Module, args: Any, kwargs: Any) -> None:
            if in_backward_pass():  # activation checkpointing calls the module again
                self._read.update(_storage(p) for p in module.parameters())
            else:
                self._calls[path] += 1
            if any(tensor.requires_grad for tensor in _tensors((args, kwargs))):
                self._needs_gradient.add(path)

        def ends(_module: nn.Module, _args: Any, output: Any) -> None:
            for tensor in _tensors(output):
                if tensor.requires_grad:
                    self._differentiable.add(path)
                    tensor.register_hook(lambda _: self._reached.add(path))

        stack.callback(module.register_forward_pre_hook(begins, with_kwargs=True).remove)
        stack.callback(module.register_forward_hook(ends).remove)

    def modules(self) -> tuple[Module, ...]:
        """Return the modules that were called, in the order of their first calls."""
        own: dict[str, dict[str, nn.Parameter]] = {path: {} for path in self._calls}
        holders: dict[int, set[str]] = {}
        for path, module in self._modules.items():
            holder = self._holder(path)
            for name, parameter in module.named_parameters(path, recurse=False):
                if holder in own and parameter.numel():
                    own[holder][name] = parameter
                    holders.setdefault(id(parameter), set()).add(holder)
        listed: set[int] = set()
        return tuple(self._module(path, own[path], holders, listed) for path in self._calls)

    def _holder(self, path: str) -> str:
        """Return the path of the module whose call makes `fully_shard` gather this module's parameters."""
        while path and path not in self._calls:
            path = path.rpartition(".")[0]
        return path

    def _module(
        self, path: str, own: dict[str, nn.Parameter], holders: dict[int, set[str]], listed: set[int]
    ) -> Module:
        first = {name: p for name, p in own.items() if id(p) not in listed}
        listed.update(map(id, first.values()))
        inside = list(self._modules[path].parameters())
        may_reach = path in self._differentiable or any(p.requires_grad for p in inside)
        return Module(
            path,
            tuple(Parameter(name, p.nbytes, _rows(p), p.element_size(), p.requires_grad) for name, p in first.items()),
            tied=tuple(sorted(set().union(*(holders[id(p)] for p in own.values())) - {path})),
            calls=self._calls[path],
            named=self._named[path],
            input_needs_gradient=path in self._needs_gradient,
            read_in_backward=any(_storage(p) in self._read for p in inside),
            reaches_loss=path in self._reached or not may_reach,
        )


def _storage(tensor: torch.Tensor) -> int:
    return storage_id(tensor.untyped_storage())


def _rows(tensor: torch.Tensor) -> int:
    return tensor.shape[0] if tensor.ndim else 1


class _Reads(DispatchMode):
    """A dispatch mode that collects which of the given storages the backward pass reads."""

    def __init__(self, storages: set[int], read: set[int]) -> None:
        super().__init__()
        self._storages, self._read = storages, read

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if in_backward_pass() or func is torch.ops.aten._to_copy.default:
            self._read |= self._storages & {_storage(tensor) for tensor in _tensors((args, kwargs))}
        return func(*args, **kwargs)


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    """Yield the dense tensors (only these have a storage) among nested arguments or results."""
    return (leaf for leaf in leaves(value) if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided)
