"""A synchronous parameter-server mode: k servers, n workers and some inference agents from one `torchrun`."""

from legato.pytorch.servers.model import AgentModel, Iteration, ServedModel
from legato.pytorch.servers.run import parameter_servers

__all__ = ["AgentModel", "Iteration", "ServedModel", "parameter_servers"]
