"""The way out for messages, one after another.

[Note: one at a time] A plan's order means something only if a message has the
network to itself. gloo works on two collectives at once by default, and so the
least urgent message of a plan would slow down the one before it. Messages
therefore go through a gloo of our own with one thread, which starts the next
one as soon as the one before has ended, with no Python in between. Other
backends (NCCL) keep the order by themselves.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

__all__ = ["in_order"]


def in_order(group: Any) -> Callable[[torch.Tensor], Any]:
    """A function that hands a tensor over to be summed in place over the group, and returns the work to wait for.

    All ranks of the group have to call this. Works are done in the order in
    which they were handed over.
    """
    if group.name() != "gloo":
        return lambda tensor: dist.all_reduce(tensor, group=group, async_op=True)
    backend: Any = dist.ProcessGroupGloo
    options = backend._Options()
    options._threads = 1
    options._timeout = group._get_backend(torch.device("cpu")).options._timeout
    interfaces = [name for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name]
    options._devices = [backend.create_device(interface=name) for name in interfaces] or [
        backend.create_default_device()
    ]
    store = torch._C._distributed_c10d.PrefixStore(f"legato/{group.group_name}", _get_default_store())
    gloo = backend(store, group.rank(), group.size(), options)
    return lambda tensor: gloo.allreduce([tensor])
