"""Makes "late" a device of torch in this process (`device="late"`), and a backend with NCCL's semantics."""

import atexit
import contextlib
import importlib.util

import torch
import torch.distributed as dist

from support.late import built


def _loaded():
    spec = importlib.util.spec_from_file_location("_late", built())
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class _Module:
    """What torch expects of the module of a device type (torch.cuda for cuda)."""

    __name__ = "torch.late"
    Event = staticmethod(lambda *a, **k: torch.Event("late", *a, **k))

    is_available = staticmethod(lambda: True)
    is_initialized = staticmethod(lambda: True)
    _is_in_bad_fork = staticmethod(lambda: False)
    device_count = staticmethod(lambda: 1)
    current_device = staticmethod(lambda: 0)
    set_device = staticmethod(lambda device: None)
    _exchange_device = staticmethod(lambda device: 0)
    _maybe_exchange_device = staticmethod(lambda device: 0)
    get_amp_supported_dtype = staticmethod(lambda: [torch.bfloat16, torch.float16])
    manual_seed = staticmethod(torch.default_generator.manual_seed)
    manual_seed_all = staticmethod(lambda seed: None)  # torch.manual_seed has set the CPU's generator, which is ours
    seed_all = staticmethod(lambda: None)
    get_rng_state = staticmethod(lambda device=None: torch.get_rng_state())
    set_rng_state = staticmethod(lambda state, device=None: torch.set_rng_state(state))
    synchronize = staticmethod(lambda device=None: torch.accelerator.synchronize())
    empty_cache = staticmethod(lambda: None)
    device = contextlib.nullcontext

    @staticmethod
    def Stream(device=None, priority=0):
        return torch.Stream(device="late", priority=priority)

    @staticmethod
    def current_stream(device=None):
        return torch.accelerator.current_stream()

    @staticmethod
    def set_stream(stream):
        torch.accelerator.set_stream(stream)

    @staticmethod
    def stream(stream):
        return stream or contextlib.nullcontext()


def _group(store, rank, size, timeout):
    gloo = dist.ProcessGroupGloo(dist.PrefixStore("late", store), rank, size, timeout)
    return _late.group(gloo, rank, size)


_late = _loaded()
seed, order, emulate, on_sync, trace, rows, stats, races, where = (
    getattr(_late, name) for name in ("seed", "order", "emulate", "on_sync", "trace", "rows", "stats", "races", "where")
)
torch.utils.rename_privateuse1_backend("late")
torch._register_device_module("late", _Module())
torch.utils.generate_methods_for_privateuse1_backend(for_tensor=True, for_module=True, for_storage=True)
dist.Backend.register_backend("late", _group, devices=["late"])
atexit.register(torch.accelerator.synchronize)
