"""A synchronous parameter-server mode: k servers, n workers and some inference agents from one `torchrun`."""

from legato.pytorch.servers.launch import parameter_servers
from legato.pytorch.servers.model import AgentModel, Iteration, ServedModel

__all__ = ["AgentModel", "Iteration", "ServedModel", "parameter_servers"]
