"""Clocks for ops: the host's, and that of a CUDA device (events), with the same methods."""

from __future__ import annotations

import time
from typing import Any

import torch

__all__ = ["DeviceClock", "HostClock", "clock_for"]


class HostClock:
    """Times ops that have run when their call returns: those of the CPU."""

    def now(self) -> Any:
        """Return a mark: the current time."""
        return time.perf_counter_ns()

    def settle(self) -> None:
        """Wait until all ops so far have run, which is always the case here."""

    def seconds(self, start: Any, stop: Any) -> float:
        """Return the seconds between two marks."""
        return float(stop - start) * 1e-9


class DeviceClock:
    """Times ops that are only queued when their call returns: marks are CUDA events in the current stream."""

    def now(self) -> Any:
        """Return a mark: an event in the current stream."""
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def settle(self) -> None:
        """Wait until the device has run all ops so far, so that marks can be read."""
        torch.cuda.synchronize()

    def seconds(self, start: Any, stop: Any) -> float:
        """Return the seconds between two marks that the device has passed (see `settle`)."""
        return float(start.elapsed_time(stop)) * 1e-3


def clock_for(device: torch.device) -> HostClock | DeviceClock:
    """Return the clock for the ops of a device."""
    return DeviceClock() if device.type == "cuda" else HostClock()
