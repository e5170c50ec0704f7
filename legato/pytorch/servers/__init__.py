"""Synchronous training with parameter servers: servers, workers and optional inference agents of one `torchrun`."""

from legato.pytorch.servers.launch import parameter_servers
from legato.pytorch.servers.model import AgentModel, Iteration, ServedModel

__all__ = ["AgentModel", "Iteration", "ServedModel", "parameter_servers"]
