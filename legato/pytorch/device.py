"""What the accelerator is doing, for code that runs on CPUs, too."""

from __future__ import annotations

import torch

__all__ = ["current_stream"]


def current_stream(device: torch.device) -> torch.Stream | None:
    """The stream on which kernels of this device are queued now; None for a CPU, which has none."""
    return None if device.type == "cpu" else torch.accelerator.current_stream(device)
