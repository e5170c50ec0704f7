"""Everything that needs PyTorch: captures a training step, measures a network, and trains by a plan."""

from legato.pytorch.network.calibrate import Calibration, calibrate
from legato.pytorch.recording.capture import capture
from legato.pytorch.runtime.model import DistributedModel, wrap_model
from legato.pytorch.runtime.sharding import GradScaler
from legato.pytorch.servers import parameter_servers

__all__ = ["Calibration", "DistributedModel", "GradScaler", "calibrate", "capture", "parameter_servers", "wrap_model"]
