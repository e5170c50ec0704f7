"""Writes down every op with its arguments, to run a recorded step again in another order."""

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_map_only

from legato.pytorch.recording.operators import operator_of, tensors


class Place:
    """Where a tensor was: a storage, and the tensor's shape in it."""

    def __init__(self, tensor, key):
        self.key, self.dtype = key, tensor.dtype
        self.geometry = (tensor.storage_offset(), tensor.size(), tensor.stride())

    def look(self, memory):
        return torch.empty(0, dtype=self.dtype).set_(memory[self.key], *self.geometry)


class Tape(TorchDispatchMode):
    """Inside a recorder's phases: keeps the calls that became ops, and what was in memory before them; no tensors."""

    def __init__(self, recorder):
        super().__init__()
        self.recorder = recorder
        self.calls = []
        self.held = {}
        self.before = {}
        self.generator = torch.get_rng_state()

    def random_state(self):
        with _disable_current_modes():  # it makes tensors
            return torch.get_rng_state()

    def place(self, tensor):
        storage = tensor.untyped_storage()
        if storage._cdata not in self.held:
            self.held[storage._cdata] = StorageWeakRef(storage)
        return Place(tensor, storage._cdata)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        places = tree_map_only(torch.Tensor, self.place, (args, kwargs))
        with _disable_current_modes():
            for tensor in tensors((args, kwargs)):
                storage = tensor.untyped_storage()
                if storage._cdata not in self.before:
                    self.before[storage._cdata] = storage.clone()
        count = len(self.recorder._ops)
        random = self.random_state() if operator_of(func).random else None
        jump = None if random is None or random.tolist() == self.generator.tolist() else random
        out = func(*args, **kwargs)
        if random is not None:
            self.generator = self.random_state()
        made = [self.place(tensor) for tensor in tensors(out)]
        for place in made:
            self.before.setdefault(place.key, None)  # made here: nothing was there before
        if len(self.recorder._ops) > count:
            self.calls.append((func, places, made, torch.is_grad_enabled(), jump))
        return out

    def replay(self, order):
        """Run the ops in this order; return a function that reads a tensor's place afterwards."""
        memory = {key: storage.clone() for key, storage in self.before.items() if storage is not None}
        for i in order:
            func, places, made, grad_enabled, jump = self.calls[i]
            if jump is not None:  # something has set the generator, as recomputation does
                torch.set_rng_state(jump)
            args, kwargs = tree_map_only(Place, lambda place: place.look(memory), places)
            with torch.set_grad_enabled(grad_enabled):  # some kernels ask whether they will be differentiated
                out = func(*args, **kwargs)
            for place, tensor in zip(made, tensors(out), strict=True):
                memory.setdefault(place.key, tensor.untyped_storage())
        return lambda tensor: self.place(tensor).look(memory)


def shuffled(ops, generator):
    """A random order in which every op stands after those that it depends on."""
    missing = [len(op.deps) for op in ops]
    needed_by = [[] for _ in ops]
    for i, op in enumerate(ops):
        for dep in op.deps:
            needed_by[dep].append(i)
    free = [i for i, count in enumerate(missing) if count == 0]
    order = []
    while free:
        i = free.pop(generator.randrange(len(free)))
        order.append(i)
        for after in needed_by[i]:
            missing[after] -= 1
            if missing[after] == 0:
                free.append(after)
    return order
