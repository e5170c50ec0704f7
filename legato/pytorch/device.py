"""Devices: one interface to the streams, clocks and random number generators of the CPU and of torch's accelerators."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

__all__ = [
    "DeviceClock",
    "Fetched",
    "HostClock",
    "can_time",
    "clock_for",
    "current_stream",
    "group_device",
    "is_capturing",
    "restorers_of_random_states",
]


def current_stream(device: torch.device) -> torch.Stream | None:
    """Return the stream to which new kernels of this device are added; None for a CPU, which has no streams."""
    return None if device.type == "cpu" else torch.accelerator.current_stream(device)


class Fetched:
    """A tensor that a device copies to the host. The host waits only when it reads the copy."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._stream = current_stream(tensor.device)
        if self._stream is None:
            self._host = tensor.clone()
            return
        self._host = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)
        self._host.copy_(tensor, non_blocking=True)
        self._copied = self._stream.record_event()

    @staticmethod
    def values(fetched: Sequence[Fetched]) -> list[torch.Tensor]:
        """Wait until all tensors are copied, once for each stream that copies, and return the copies in order."""
        for event in {each._stream: each._copied for each in fetched if each._stream is not None}.values():
            event.synchronize()
        return [each._host for each in fetched]


def group_device(group: Any) -> torch.device:
    """Return the device of the tensors that a process group's collectives take. For gloo, the device is the CPU."""
    accelerator = None if group.name() == "gloo" else torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        return torch.device("cpu")
    return torch.device(accelerator.type, torch.accelerator.current_device_index())


def is_capturing() -> bool:
    """Return whether a CUDA graph is being captured; if so, the host may use the device only for work of this graph."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def restorers_of_random_states() -> list[Callable[[], object]]:
    """Return functions that reset the accelerators' random number generators to their present states."""
    if not torch.accelerator.is_available():
        return []
    module = torch.get_device_module()
    if not getattr(module, "is_initialized", lambda: True)():
        return []
    return [
        partial(module.set_rng_state, module.get_rng_state(index), index)
        for index in range(torch.accelerator.device_count())
    ]


class HostClock:
    """A clock for ops that have finished when their call returns, as on the CPU."""

    def now(self) -> Any:
        """Return a mark: the current time."""
        return time.perf_counter_ns()

    def seconds(self, start: Any, stop: Any) -> float:
        """Return the seconds between two marks."""
        return float(stop - start) * 1e-9


class DeviceClock:
    """A clock for ops that are only queued when their call returns.

    The clock's marks are events in the device's current stream.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def now(self) -> Any:
        """Return a mark: an event in the current stream."""
        event = torch.Event(self._device, enable_timing=True)
        event.record()
        return event

    def seconds(self, start: Any, stop: Any) -> float:
        """Wait until the device has passed two marks, and return the seconds between them."""
        start.synchronize()
        stop.synchronize()
        return float(start.elapsed_time(stop)) * 1e-3


def can_time(device: torch.device) -> bool:
    """Return whether ops on a device can be timed: the device is a CPU or an available accelerator, and not `meta`."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return device.type == "cpu" or (accelerator is not None and device.type == accelerator.type)


def clock_for(device: torch.device) -> HostClock | DeviceClock:
    """Return the clock for the ops of a device."""
    return HostClock() if device.type == "cpu" else DeviceClock(device)
