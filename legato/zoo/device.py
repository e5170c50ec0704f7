"""A device that computes: its peak speeds, and the share of these peaks that ops reach."""

from __future__ import annotations

import math

import msgspec

from legato.core.errors import InputError, unknown_name
from legato.core.job import Machine

__all__ = ["EFFICIENCY", "OVERHEAD_S", "PRECISIONS", "Device"]

#: The share of its peak that a device reaches in matrix products. The Network Operator Edition's forward time of
#: Inception-v3 (Table 3: 0.176 s for 32 images of 1.1e10 FLOPs) is 0.46 of half a K80's peak. Published steps of
#: language models reach 0.3 to 0.65 of the peak of an A100 or H100 (`benchmarks/language_models.py`).
EFFICIENCY = 0.5
#: Seconds from the start of an op until its work starts, for the launch of a kernel.
OVERHEAD_S = 5e-6
#: Bytes of a value in each floating-point format in which models are trained; `fp32` includes TF32 tensor cores.
PRECISIONS = {"fp32": 4, "bf16": 2, "fp16": 2}


class Device(msgspec.Struct, frozen=True):
    """A roofline model: an op takes the time of its arithmetic or of its memory traffic, whichever is longer.

    `flops_per_s` is the peak of 32-bit training (a multiply-add counts as two). `bf16_flops_per_s` and
    `fp16_flops_per_s` are the peaks of 16-bit training, or None if the device lacks this format. `efficiency` is the
    share of a peak that is reached, `bytes_per_s` is the memory bandwidth, and `overhead_s` (seconds) is added once per
    op. Raises `InputError` on speeds that are not above zero, and on an efficiency above 1.
    """

    name: str
    flops_per_s: float
    bytes_per_s: float
    overhead_s: float = OVERHEAD_S
    efficiency: float = EFFICIENCY
    bf16_flops_per_s: float | None = None
    fp16_flops_per_s: float | None = None

    def __post_init__(self) -> None:
        for field in ("flops_per_s", "bytes_per_s", "efficiency", "bf16_flops_per_s", "fp16_flops_per_s"):
            value = getattr(self, field)
            if value is not None and not (math.isfinite(value) and value > 0):
                raise InputError(f"device {self.name!r}: {field}: {value} (expected a finite number above 0)")
        if self.efficiency > 1:
            raise InputError(f"device {self.name!r}: efficiency: {self.efficiency} (expected at most 1, the peak)")
        if not (math.isfinite(self.overhead_s) and self.overhead_s >= 0):
            raise InputError(f"device {self.name!r}: overhead_s: {self.overhead_s} (expected seconds, at least 0)")

    @classmethod
    def of(cls, machine: Machine) -> Device:
        """Return the GPU of a machine; in TF32, its tensor cores compute half as fast as in 16 bits."""
        peak = machine.flops_per_s
        return cls(machine.name, peak / 2, machine.memory_bytes_per_s, bf16_flops_per_s=peak, fp16_flops_per_s=peak)

    def peak(self, precision: str = "fp32") -> float:
        """Return the peak FLOP/s in one of `PRECISIONS`. Raises `InputError` if the device lacks this format."""
        peaks = {"fp32": self.flops_per_s, "bf16": self.bf16_flops_per_s, "fp16": self.fp16_flops_per_s}
        if precision not in peaks:
            raise unknown_name("precision", precision, PRECISIONS)
        peak = peaks[precision]
        if peak is None:
            known = " or ".join(name for name, value in peaks.items() if value is not None)
            raise InputError(f"device {self.name!r}: no peak in {precision} (expected precision {known})")
        return peak

    def time_s(self, flops: float, nbytes: float, precision: str = "fp32") -> float:
        """Return the seconds of an op with this number of FLOPs and bytes. Raises `InputError` as `peak` does."""
        return self.overhead_s + max(flops / (self.peak(precision) * self.efficiency), nbytes / self.bytes_per_s)
