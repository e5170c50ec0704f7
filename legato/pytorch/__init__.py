"""The part of legato that needs PyTorch: captures training steps, measures networks, and trains under plans."""

from legato.pytorch.network.calibrate import Calibration, calibrate
from legato.pytorch.recording.capture import capture
from legato.pytorch.runtime.attached.attach import attach, attachment
from legato.pytorch.runtime.attached.attachment import Attachment
from legato.pytorch.runtime.sharding.shards import GradScaler

__all__ = [
    "Attachment",
    "Calibration",
    "GradScaler",
    "attach",
    "attachment",
    "calibrate",
    "capture",
]
