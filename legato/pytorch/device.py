"""Devices: their streams, clocks and random numbers, in the same words for a CPU and for any accelerator of torch."""

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
    """The stream on which kernels of this device are queued now; None for a CPU, which has none."""
    return None if device.type == "cpu" else torch.accelerator.current_stream(device)


class Fetched:
    """A tensor that is being copied to the host, without waiting for the device."""

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
        """The tensors on the host, in this order; waits once for each stream that copies some."""
        for event in {each._stream: each._copied for each in fetched if each._stream is not None}.values():
            event.synchronize()
        return [each._host for each in fetched]


def group_device(group: Any) -> torch.device:
    """The device of the tensors that a process group's collectives take: gloo's are on the CPU."""
    accelerator = None if group.name() == "gloo" else torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        return torch.device("cpu")
    return torch.device(accelerator.type, torch.accelerator.current_device_index())


def is_capturing() -> bool:
    """Return whether kernels are recorded into a graph now, so that nothing else may be asked of the device."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def restorers_of_random_states() -> list[Callable[[], object]]:
    """Functions that give the accelerators' random number generators the states that they have now."""
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
    """Times ops that have run when their call returns, as on the CPU."""

    def now(self) -> Any:
        """Return a mark: the current time."""
        return time.perf_counter_ns()

    def seconds(self, start: Any, stop: Any) -> float:
        """Return the seconds between two marks."""
        return float(stop - start) * 1e-9


class DeviceClock:
    """Times ops that are only queued when their call returns: marks are events in the device's current stream."""

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
    """Return whether a device computes: it is a CPU or an accelerator that is here, and not `meta`."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return device.type == "cpu" or (accelerator is not None and device.type == accelerator.type)


def clock_for(device: torch.device) -> HostClock | DeviceClock:
    """Return the clock for the ops of a device."""
    return HostClock() if device.type == "cpu" else DeviceClock(device)
