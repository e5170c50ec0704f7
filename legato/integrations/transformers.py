"""legato under the Trainer of Hugging Face transformers.

trainer = Trainer(model, arguments, train_dataset=data)
trainer.add_callback(legato.integrations.transformers.Legato(trainer))
"""

from __future__ import annotations

from typing import Any

from transformers import Trainer, TrainerCallback

from legato.auto import distribute
from legato.pytorch.runtime.attached.attach import attachment_of, find_ddp

__all__ = ["Legato"]


class Legato(TrainerCallback):
    """A callback that attaches legato when training begins; `options` are passed to `legato.distribute`."""

    def __init__(self, trainer: Trainer, **options: Any) -> None:
        self._trainer, self._options = trainer, options

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Attach legato to the model and the optimizer, if the Trainer has wrapped the model in DDP."""
        if find_ddp(self._trainer.model_wrapped) is not None:
            distribute(self._trainer.model_wrapped, self._trainer.optimizer, **self._options)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Detach legato; all parameters are then up to date."""
        ddp = find_ddp(self._trainer.model_wrapped)
        if ddp is not None and (attached := attachment_of(ddp)) is not None:
            attached.detach()
