"""Process groups and the stores through which their ranks meet."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import (
    _get_default_group,
    _get_default_store,
    _new_process_group_helper,
    _unregister_process_group,
    _world,
)

__all__ = [
    "PrefixStore",
    "default_store",
    "group_timeout",
    "new_gloo",
    "own_group",
]

#: The part of a store that has keys with a prefix. The class is public, but `torch.distributed` does not export it
#: explicitly.
PrefixStore: Any = dist.PrefixStore


def default_store() -> Any:
    """Return the store through which `init_process_group` has connected the ranks."""
    return _get_default_store()


def group_timeout(group: Any, device: torch.device) -> timedelta:
    """Return the timeout of the group's collectives on tensors of this device."""
    return cast(timedelta, group._get_backend(device).options._timeout)


def own_group(group: Any, name: str, timeout: timedelta) -> Any:
    """Return a new process group with the ranks and the backend of `group`, whose members alone make it.

    `name` must be the same on all members, and must never have been used in this job. torch makes the names of the
    program's groups from the number of groups that each rank has made or knows, so torch is not told about this one.
    (`dist.new_group` would count it, and then a later group of the program could have different names on its ranks.)
    """
    ranks, everyone, world = dist.get_process_group_ranks(group), _get_default_group(), cast(Any, _world)
    bound, everyone.bound_device_id = everyone.bound_device_id, None  # otherwise ranks that are no members must help
    try:
        own: Any = _new_process_group_helper(
            len(ranks), group.rank(), ranks, world.pg_map[group][0], default_store(), cast(Any, name), timeout=timeout
        )[0]
    finally:
        everyone.bound_device_id = bound
    for table in (world.pg_map, world.pg_names, world.pg_backend_config, world.pg_group_ranks):
        table.pop(own, None)
    for groups in (world.tags_to_pg.pop(world.pg_to_tag.pop(own)), world.tags_to_pg.get("", [])):
        if own in groups:
            groups.remove(own)
    _unregister_process_group(cast(Any, name))
    return own


def new_gloo(store: Any, rank: int, ranks: int, timeout: timedelta, interfaces: list[str]) -> Any:
    """Return a gloo backend with one thread, outside any process group.

    The backend uses the network interfaces in `interfaces`, or the default interface if there are none.
    """
    backend: Any = dist.ProcessGroupGloo
    options = backend._Options()
    options._threads = 1
    options._timeout = timeout
    devices = [backend.create_device(interface=name) for name in interfaces]
    options._devices = devices or [backend.create_default_device()]
    return backend(store, rank, ranks, options)
