"""DDP's communication hooks: a function of the user, instead of an all-reduce, sends each bucket in the plan's order.

[Note: hooks] As in DDP, a hook gets a bucket of this rank's gradients, not
divided by the number of ranks, and returns a future of what they become. It
makes collectives of its own, so it cannot carry out the parts of a plan that say
how a message is sent: halves, and collectives made of steps. The elements of the
bucket that count gradients are sent behind it, by the runtime itself.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from legato.core.errors import InputError
from legato.core.plan import Plan
from legato.pytorch.network.channel import Channel
from legato.pytorch.network.rounds import ROUNDS
from legato.pytorch.runtime import gate
from legato.pytorch.runtime.buckets import Bucket

__all__ = ["CommHook", "can_be_hooked"]


def can_be_hooked(plan: Plan) -> bool:
    """Whether a hook can send all messages of a plan: whole tensors as they are, by the backend's own all-reduce."""
    plain = all(m.kind == "all_reduce" and m.collective not in ROUNDS and m.wire is None for m in plan.messages)
    tensors = [piece.tensor for message in plan.messages for piece in message.slices]
    return plain and len(tensors) == len(set(tensors))


class GradBucket:
    """What a hook gets, with the methods of `torch.distributed.GradBucket`, which Python cannot create."""

    def __init__(self, bucket: Bucket, buffer: Tensor, last: bool) -> None:
        self._bucket, self._buffer, self._last = bucket, buffer, last

    def index(self) -> int:
        return self._bucket.index

    def buffer(self) -> Tensor:
        return self._buffer

    def gradients(self) -> list[Tensor]:
        shapes = [piece.view.shape for piece in self._bucket.slices]
        parts = torch.split(self._buffer, [shape.numel() for shape in shapes])
        return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]

    def parameters(self) -> list[Tensor]:
        return [piece.slot.parameter for piece in self._bucket.slices]

    def is_last(self) -> bool:
        return self._last

    def set_buffer(self, tensor: Tensor) -> None:
        self._buffer = tensor


class CommHook:
    """Sends buckets with the user's `hook(state, bucket)`, and what counts their gradients through the channel."""

    def __init__(self, state: object, hook: Callable[..., Any], channel: Channel) -> None:
        self._state, self._hook, self._channel = state, hook, channel

    def send(self, bucket: Bucket, last: bool) -> Any:
        """Launch a message, and return the work to wait for."""
        assert bucket.flags is not None
        data = bucket.buffer[: bucket.buffer.numel() - bucket.flags.numel()]
        future = self._hook(self._state, GradBucket(bucket, data, last))
        if not hasattr(future, "add_done_callback"):
            raise InputError(
                f"the communication hook returned {type(future).__name__} (expected a torch.futures.Future)"
            )
        return _HookedWork(future, data, self._channel(bucket.flags, bucket.message))


class _HookedWork:
    """A message that a hook has sent, with the methods of torch's `Work`."""

    def __init__(self, future: torch.futures.Future[Any], target: Tensor, flags: Any) -> None:
        self._future, self._target, self._flags = future, target, flags
        self._done = threading.Event()
        future.add_done_callback(lambda _: self._done.set())

    def is_completed(self) -> bool:
        return self._done.is_set() and bool(self._flags.is_completed())

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait, and put the result into the bucket. Raises `RuntimeError` if the hook failed or takes longer."""
        if not self._done.wait(timeout.total_seconds() if timeout else None):
            raise RuntimeError("not done in time")
        result = self._future.wait()
        result = result[0] if isinstance(result, list | tuple) else result
        with gate.invisible():
            if result.data_ptr() != self._target.data_ptr():
                self._target.copy_(result.view_as(self._target))
        return bool(self._flags.wait(timeout) if timeout else self._flags.wait())

    def get_future(self) -> torch.futures.Future[Any]:
        return self._future
