"""Which parameters take part."""

from __future__ import annotations

from torch import nn

__all__ = ["trained_parameters"]


def trained_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that require a gradient and are not empty, by name; a shared one once."""
    return {name: p for name, p in module.named_parameters() if p.requires_grad and p.numel()}
