"""Devices: peak speeds from the vendors' data sheets, and one efficiency for all of them."""

from __future__ import annotations

import math
from dataclasses import dataclass

from legato.core.errors import InputError, unknown_name

__all__ = ["DEVICES", "EFFICIENCY", "OVERHEAD_S", "Device", "device_named"]

#: The share of its peak that a device reaches in matrix products. The Network Operator Edition's forward time of
#: Inception-v3 (Table 3: 0.176 s for 32 images of 1.1e10 FLOPs) is 0.46 of half a K80's peak.
EFFICIENCY = 0.5
#: Seconds between the start of an op and the start of its work: the launch of a kernel.
OVERHEAD_S = 5e-6


@dataclass(frozen=True, slots=True)
class Device:
    """A roofline model: an op takes the time of its arithmetic or of its memory traffic, whichever is longer.

    `flops_per_s` is the peak of 32-bit training (a multiply-add is two);
    `efficiency` is the share of it that is reached; `bytes_per_s` is the memory
    bandwidth; `overhead_s` (seconds) is added once per op. Raises `InputError`
    on speeds that are not above zero.
    """

    name: str
    flops_per_s: float
    bytes_per_s: float
    overhead_s: float = OVERHEAD_S
    efficiency: float = EFFICIENCY

    def __post_init__(self) -> None:
        for field in ("flops_per_s", "bytes_per_s", "efficiency"):
            value = getattr(self, field)
            if not (math.isfinite(value) and value > 0):
                raise InputError(f"device {self.name!r}: {field}: {value} (expected a finite number above 0)")
        if not (math.isfinite(self.overhead_s) and self.overhead_s >= 0):
            raise InputError(f"device {self.name!r}: overhead_s: {self.overhead_s} (expected seconds, at least 0)")

    def time_s(self, flops: float, nbytes: float) -> float:
        """Return the seconds of an op with this number of FLOPs and bytes."""
        return self.overhead_s + max(flops / (self.flops_per_s * self.efficiency), nbytes / self.bytes_per_s)


#: FP32 peak with boost and memory bandwidth; `a100` and `h100` with TF32 tensor cores (dense).
#: `k80` is one of the two processors of a K80 board: a worker in the papers has one.
DEVICES = {
    device.name: device
    for device in (
        Device("k80", 4.37e12, 240e9),
        Device("titan-x-maxwell", 6.6e12, 336.5e9),
        Device("titan-x-pascal", 10.97e12, 480e9),
        Device("titan-xp", 12.15e12, 547.7e9),
        Device("gtx-1080ti", 11.34e12, 484e9),
        Device("p100", 10.6e12, 732e9),
        Device("v100", 15.7e12, 900e9),
        Device("a100", 156e12, 1555e9),
        Device("h100", 494.5e12, 3350e9),
    )
}


def device_named(name: str) -> Device:
    """Return one of `DEVICES`. Raises `InputError`, with the nearest names, on an unknown one."""
    if name not in DEVICES:
        raise unknown_name("device", name, DEVICES)
    return DEVICES[name]
