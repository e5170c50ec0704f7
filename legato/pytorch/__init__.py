"""Everything that needs PyTorch: captures a training step, measures a network, and trains by a plan."""

from legato.pytorch.network.calibrate import Calibration, calibrate
from legato.pytorch.recording.capture import capture
from legato.pytorch.runtime.attach import Attachment, attach, attachment
from legato.pytorch.runtime.sharding import GradScaler
from legato.pytorch.servers import parameter_servers

__all__ = [
    "Attachment",
    "Calibration",
    "GradScaler",
    "attach",
    "attachment",
    "calibrate",
    "capture",
    "parameter_servers",
]
