"""Synchronous training with parameter servers: servers, workers and optional inference agents of one `torchrun`.

`launch` gives every rank its role, and `model` is what a training script sees. `worker/` is the workers' side and
`server` the servers', which hold the parameters in `shards` and the optimizer's states in `held`; they speak the
`protocol`.
"""

from legato.pytorch.servers.launch import parameter_servers
from legato.pytorch.servers.model import AgentModel, Iteration, ServedModel

__all__ = ["AgentModel", "Iteration", "ServedModel", "parameter_servers"]
