"""Synchronous training with parameter servers: servers, workers and optional inference agents in one `torchrun`.

`launch` gives every rank its role, and `model` has what a training script uses. `worker/` has the code of workers, and
`server` has the code of servers. Servers hold the parameters in `shards` and the optimizer's states in `held`. All
ranks use the `protocol`.
"""

from legato.lab.servers.launch import parameter_servers
from legato.lab.servers.model import AgentModel, Iteration, ServedModel

__all__ = ["AgentModel", "Iteration", "ServedModel", "parameter_servers"]
