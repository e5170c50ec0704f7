"""legato under Lightning.

trainer = lightning.Trainer(strategy="ddp", callbacks=[legato.integrations.lightning.Legato()])
"""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Callback

from legato.auto import distribute
from legato.pytorch.runtime.attached.attach import attachment_of, find_ddp

__all__ = ["Legato"]


class Legato(Callback):
    """A callback that attaches legato when training starts; `options` are passed to `legato.distribute`."""

    def __init__(self, **options: Any) -> None:
        self._options = options

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Attach legato to the model and all of its optimizers, if the strategy is DDP."""
        if trainer.strategy.model is not None and find_ddp(trainer.strategy.model) is not None:
            for optimizer in trainer.optimizers or [None]:
                distribute(trainer.strategy.model, optimizer, **self._options)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Detach legato, because Lightning removes the DDP wrapper from the model."""
        ddp = find_ddp(trainer.strategy.model)
        if ddp is not None and (attached := attachment_of(ddp)) is not None:
            attached.detach()
