"""The models of the demo, which are built from their published configurations without downloads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

__all__ = ["MODELS", "Training", "gpt2", "resnet50"]


class Training(NamedTuple):
    """A model, its optimizer, and a function that returns a wrapped model's loss on the next batch."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    loss: Callable[[nn.Module], torch.Tensor]
    batch_size: int


def _batches() -> torch.Generator:
    """Return a random number generator with a different seed on each rank."""
    return torch.Generator().manual_seed(dist.get_rank() if dist.is_initialized() else 0)


def resnet50() -> Training:
    """Build ResNet-50 (25.6 million parameters), with twelve images of 64 x 64 pixels per step."""
    # This import takes seconds, so it waits until a model is built.
    from transformers import ResNetConfig, ResNetForImageClassification

    shape: Any = ResNetConfig()
    shape.num_labels = 1000
    model = ResNetForImageClassification(shape)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    random = _batches()

    def loss(through: nn.Module) -> torch.Tensor:
        images = torch.randn(12, 3, 64, 64, generator=random)
        labels = torch.randint(0, 1000, (12,), generator=random)
        output: Any = through(pixel_values=images, labels=labels)
        return output.loss

    return Training(model, optimizer, loss, batch_size=12)


def gpt2() -> Training:
    """Build a small GPT-2 (6 layers of width 384, 15 million parameters), with 4 x 64 tokens per step."""
    from transformers import GPT2Config, GPT2LMHeadModel

    shape = GPT2Config(
        n_layer=6, n_head=6, n_embd=384, vocab_size=10_000, n_positions=128, bos_token_id=0, eos_token_id=0
    )
    shape.loss_type = "ForCausalLM"
    model = GPT2LMHeadModel(shape)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    random = _batches()

    def loss(through: nn.Module) -> torch.Tensor:
        tokens = torch.randint(0, 10_000, (4, 64), generator=random)
        output: Any = through(input_ids=tokens, labels=tokens)
        return output.loss

    return Training(model, optimizer, loss, batch_size=4)


MODELS: dict[str, Callable[[], Training]] = {"resnet-50": resnet50, "gpt2-small": gpt2}
