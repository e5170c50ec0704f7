"""legato under Hugging Face Accelerate.

    model, optimizer, loader = legato.integrations.accelerate.prepare(accelerator, model, optimizer, loader)

takes the place of `accelerator.prepare(model, optimizer, loader)`; everything else stays as it is.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.optim import Optimizer

from legato.auto import distribute
from legato.pytorch.runtime.attached.attach import find_ddp

__all__ = ["prepare"]


def prepare(accelerator: Any, *objects: Any, **options: Any) -> Any:
    """Return the result of `accelerator.prepare`, with legato attached to each model that is wrapped in DDP.

    `options` are passed to `legato.distribute`. A model in DDP gets every optimizer that has any of the model's
    parameters.
    """
    prepared = accelerator.prepare(*objects)
    everything = prepared if isinstance(prepared, tuple) else (prepared,)
    optimizers = [found for found in everything if isinstance(found, Optimizer)]
    for model in (found for found in everything if isinstance(found, nn.Module)):
        if find_ddp(model) is None:
            continue
        mine = {id(p) for p in model.parameters()}
        own: list[Any] = [o for o in optimizers if any(id(p) in mine for g in o.param_groups for p in g["params"])]
        for optimizer in own or [None]:
            distribute(model, optimizer, **options)
    return prepared
