"""Launches messages one after another and waits for them, through a connection between the ranks."""

from __future__ import annotations

import time
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from legato.pytorch.device import group_device
from legato.pytorch.network.agreement import gather_tensor, unique_name
from legato.pytorch.network.channel import channel_for
from legato.pytorch.network.threads import batch_policy_threads
from legato.pytorch.network.watchdog import Watchdog
from legato.pytorch.private.groups import group_timeout, own_group
from legato.pytorch.runtime.sending.debug import COMPARED, DebugChecks
from legato.pytorch.runtime.sending.tracing import Tracer
from legato.pytorch.runtime.waiting import gate
from legato.pytorch.runtime.waiting.buckets import Bucket

__all__ = ["Connection", "Messages"]


class Connection:
    """The groups through which the ranks of a model send legato's messages and watch each other.

    `model_group` is the model's process group. The `watchdog` watches the ranks of this group.
    """

    def __init__(self, model_group: Any, watchdog: Watchdog, debug: Sequence[str]) -> None:
        timeout = group_timeout(model_group, group_device(model_group))
        with batch_policy_threads():
            # A separate group, so that no other collective comes between two messages.
            self.group: Any = own_group(model_group, unique_name(model_group), timeout)
        self.watchdog = watchdog
        compared = set(debug) & set(COMPARED)
        self.checks = DebugChecks(tuple(debug), self.group, timeout) if compared else None
        weakref.finalize(self, _release, self.group, self.watchdog).atexit = False  # pyrefly: ignore[missing-attribute]
        self.channel = channel_for(self.group)

    def gather(self, tensor: Tensor, doing: str) -> Tensor:
        """Return the tensors of all ranks, on the group's device; if a rank fails, the error message names `doing`."""
        try:
            return gather_tensor(tensor, self.group, self.watchdog.wait)
        except RuntimeError as error:
            raise self.watchdog.failure(doing, error) from error

    def gather_numbers(self, numbers: Sequence[float], doing: str) -> list[tuple[float, ...]]:
        """Return the numbers of all ranks; if a rank fails, the error message names `doing`."""
        return [tuple(row) for row in self.gather(torch.tensor(numbers, dtype=torch.float64), doing).tolist()]


def _release(group: Any, watchdog: Watchdog) -> None:
    """Shut down the group of a deleted model. Do nothing after a failed collective: this could then time out."""
    if group.name() == "gloo" and not watchdog.failed:
        group.shutdown()


class Messages:
    """Launches the messages of a plan and waits for them; counts this rank's passes."""

    def __init__(self, connection: Connection) -> None:
        self.connection, self.group, self.watchdog = connection, connection.group, connection.watchdog
        self.tracer: Tracer | None = None
        self.forwards = 0  # the number of forward passes whose gradients will be sent
        self.passes = 0  # the number of backward passes that sent, including the current one
        self.in_backward = False

    def begin_pass(self) -> None:
        """Record that a backward pass that sends begins."""
        self.in_backward = True
        self.passes += 1
        self.watchdog.passes += 1
        self.watchdog.flight_recorder.note("backward begins", self.passes)

    def end_pass(self) -> None:
        """Record that the backward pass has ended."""
        self.in_backward = False
        self.watchdog.flight_recorder.note("backward ends", self.passes)

    def launch(self, bucket: Bucket) -> None:
        """Launch the message of a bucket."""
        self.watchdog.flight_recorder.note("message goes out", self.passes, bucket.index, bucket.label)
        with gate.invisible():
            if self.connection.checks:
                self.connection.checks.check(bucket, self.passes, self.forwards, self.watchdog)
            bucket.work = self.connection.channel(bucket.buffer, bucket.message)
        if self.tracer:
            self.tracer.message(bucket.label, bucket.buffer.nbytes, bucket.work)

    def wait(self, bucket: Bucket) -> None:
        """Wait until the message of a bucket has arrived, if one is in flight."""
        work = bucket.work
        if work is None:
            return
        resume = self.tracer.switch(None) if self.tracer else None
        started = time.monotonic()
        try:
            self.watchdog.wait(work)
        except RuntimeError as error:
            self.connection.channel.give_up()
            waited = f"failed after {time.monotonic() - started:.1f} s"
            what = f"message {bucket.index} ({bucket.label}) of backward pass {self.passes} {waited}"
            raise self.watchdog.failure(what, error) from error
        bucket.work = None
        self.watchdog.flight_recorder.note("message came in", self.passes, bucket.index, bucket.label)
        if self.tracer:
            self.tracer.switch(resume)

    def gather(self, tensor: Tensor, doing: str) -> Tensor:
        """Return the tensors of all ranks, on the group's device; if a rank fails, the error message names `doing`."""
        return self.connection.gather(tensor, f"{doing} after backward pass {self.passes}")
