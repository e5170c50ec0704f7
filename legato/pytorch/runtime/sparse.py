"""Averages of sparse gradients, each in one all-reduce at the end of the backward pass, as in DDP."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from legato.core.errors import RankError
from legato.pytorch.network.watchdog import Watchdog
from legato.pytorch.runtime import gate

__all__ = ["SparseGradients"]


class SparseGradients:
    """The gradients of embeddings with `sparse=True`."""

    def __init__(self, parameters: Mapping[str, nn.Parameter], group: Any, watchdog: Watchdog) -> None:
        self.parameters = parameters
        self._group = group
        self._watchdog = watchdog

    def average(self, backward_pass: int, zero: bool = False) -> None:
        """Average them over the ranks, or contribute nothing to the average; `backward_pass` is for error messages.

        Raises `RankError` if one is dense, or if an all-reduce fails.
        """
        for name, parameter in self.parameters.items():
            grad = None if zero else parameter.grad
            if grad is not None and not grad.is_sparse:
                raise RankError(f"{name}: its gradient is dense, but the embedding has sparse=True (a shared weight?)")
            averaged = grad
            if averaged is None:  # no row of it
                rows = torch.empty(0, dtype=torch.long, device=parameter.device)
                averaged = torch.sparse_coo_tensor(
                    rows[None], parameter.detach()[rows], parameter.shape, check_invariants=False
                )
            try:
                with gate.invisible():
                    averaged.div_(self._group.size())
                    self._watchdog.wait(dist.all_reduce(averaged, group=self._group, async_op=True))
            except RuntimeError as error:
                what = f"the sparse gradient of {name} in backward pass {backward_pass} failed"
                raise self._watchdog.failure(what, error) from error
            if not zero and grad is None and averaged.coalesce().indices().numel():
                parameter.grad = averaged
