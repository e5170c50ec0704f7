"""Two clocks with one face: the host's, and the device's own (CUDA events)."""

from __future__ import annotations

import time
from typing import Any

import torch

__all__ = ["DeviceClock", "HostClock", "clock_for"]


class HostClock:
    """For ops that have run when their call returns: the CPU's."""

    def now(self) -> Any:
        """A mark in time."""
        return time.perf_counter_ns()

    def settle(self) -> None:
        """Return when everything asked for so far has run, so that marks can be read."""

    def seconds(self, start: Any, stop: Any) -> float:
        """Seconds between two marks."""
        return float(stop - start) * 1e-9


class DeviceClock:
    """For ops that are only queued when their call returns: marks are CUDA events in the current stream."""

    def now(self) -> Any:
        """A mark in the stream of work."""
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def settle(self) -> None:
        """Wait for the device."""
        torch.cuda.synchronize()

    def seconds(self, start: Any, stop: Any) -> float:
        """Seconds between two marks that the device has passed (see `settle`)."""
        return float(start.elapsed_time(stop)) * 1e-3


def clock_for(device: torch.device) -> HostClock | DeviceClock:
    """The clock that sees the ops of a device end."""
    return DeviceClock() if device.type == "cuda" else HostClock()
