"""The channel: runs messages one after another, in the order in which they are launched.

docs/runtime.md ("What gloo needs") explains why messages run one at a time. Over gloo, messages go through a separate
backend with one thread; other backends (NCCL) keep the order anyway.

[Note: rounds] A collective that consists of sends and receives (docs/collectives.md) needs a Python thread that starts
its next round when bytes arrive. While this thread has work, every message goes to it, including the backend's own
all-reduces. Before its first message, the thread waits for the message that the backend is still running. The thread
ends with the channel. A process waits for the thread before it ends. But it does not wait after a message has failed,
because a send to a rank that is gone can take the whole timeout to fail.
"""

from __future__ import annotations

import os
import queue
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as _Timeout
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from legato.collectives import COLLECTIVES
from legato.core.cluster import BACKENDS, carries_out
from legato.core.errors import PlanError
from legato.core.plan import Message
from legato.pytorch.device import current_stream
from legato.pytorch.network.collectives import Collectives
from legato.pytorch.network.threads import batch_policy_threads
from legato.pytorch.private.groups import PrefixStore, default_store, group_timeout, new_gloo

__all__ = ["Channel", "channel_for", "check_message"]

#: The default collective for messages over gloo that gloo's own all-reduce cannot send.
_OWN = "ring"
_KINDS = ("all_reduce", "reduce_scatter", "all_gather")


class Channel(Protocol):
    """Runs messages in the order in which they are launched."""

    def __call__(self, buffer: Tensor, message: Message) -> Any:
        """Launch a message that changes a flat buffer in place, and return the work to wait for."""

    def give_up(self) -> None:
        """Record that a message has failed, so that the process can end without waiting for messages in flight."""


def channel_for(group: Any) -> Channel:
    """Create the channel of a process group. All ranks of the group must call this function, once for each group."""
    return _GlooChannel(group) if group.name() == "gloo" else _BackendChannel(group)


def check_message(message: Message, name: str, backend: str) -> None:
    """Raise `PlanError` if no channel over this backend can run the message; the error calls the message `name`."""
    if message.kind not in _KINDS:
        raise PlanError(f"{name}.kind: {message.kind!r} (expected {', '.join(map(repr, _KINDS))})")
    if backend != "gloo":
        if message.collective is not None and not carries_out(backend, message.collective):
            option = f"--backend {backend if backend in BACKENDS else 'any'}"
            raise PlanError(
                f"{name}.collective: {message.collective!r} (expected 'ring', which {backend} carries out in its own "
                f"way; others run over gloo only): plan again with legato plan {option}"
            )
        return
    if _steps_of(message) is None and message.depth > 1:
        raise PlanError(f"{name}.depth: {message.depth} (expected 1 with gloo's own all-reduce)")
    if message.collective not in (None, *COLLECTIVES) and message.collective not in dist.Backend.backend_list:
        known = ", ".join(["gloo", *COLLECTIVES])
        raise PlanError(f"{name}.collective: {message.collective!r} (this runtime carries out {known})")


class _BackendChannel:
    """The channel of a backend that keeps the order of collectives and has its own reduce_scatter and all_gather."""

    def __init__(self, group: Any) -> None:
        self._group = group

    def give_up(self) -> None:
        """Do nothing, because the backend, not this channel, has the messages in flight."""

    def __call__(self, buffer: Tensor, message: Message) -> Any:
        group = self._group
        if message.kind == "all_reduce":
            return dist.all_reduce(buffer, group=group, async_op=True)
        own = buffer.chunk(group.size())[group.rank()]
        if message.kind == "reduce_scatter":
            return dist.reduce_scatter_tensor(own, buffer, group=group, async_op=True)
        return dist.all_gather_into_tensor(buffer, own, group=group, async_op=True)


class _GlooChannel:
    """The channel over gloo: a backend with one thread, and a Python thread for collectives made of rounds."""

    def __init__(self, group: Any) -> None:
        timeout = group_timeout(group, torch.device("cpu"))
        self._gloo = _gloo(group, timeout)
        dist.barrier(group)  # a rank that refuses its plan must not leave while another rank is still connecting to it
        self._steps = Collectives(self._gloo, timeout)
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._failed = threading.Event()
        self._thread: threading.Thread | None = None
        self._last: Any = None  # the work of the last message

    def __call__(self, buffer: Tensor, message: Message) -> Any:
        busy = isinstance(self._last, _QueuedWork) and not self._last.is_completed()
        if _steps_of(message) is None and not busy and not self._failed.is_set():
            self._last = self._gloo.allreduce([buffer])
        else:
            stream = current_stream(buffer.device)
            written = None if stream is None else stream.record_event()
            before = None if busy else self._last
            self._last = self._queue(lambda: self._carry_out(before, written, buffer, message))
        return self._last

    def give_up(self) -> None:
        self._failed.set()

    def _queue(self, do: Callable[[], None]) -> _QueuedWork:
        if self._thread is None:
            self._thread = threading.Thread(target=_serve, args=(self._jobs,), name="legato-channel", daemon=True)
            self._thread.start()
            weakref.finalize(self, _end, self._jobs, self._thread, self._failed)
        future: Future[None] = Future()
        self._jobs.put((future, do))
        return _QueuedWork(future)

    def _carry_out(self, before: Any, written: Any, buffer: Tensor, message: Message) -> None:
        """Run a message on the thread, after all messages that were launched earlier."""
        if self._failed.is_set():
            raise RuntimeError("not sent, because a message before it has failed")
        try:
            if before is not None:
                before.wait()
            if written is not None:
                written.synchronize()
            self._do(buffer, message)
        except RuntimeError:
            self._failed.set()
            raise

    def _do(self, buffer: Tensor, message: Message) -> None:
        steps, stream = _steps_of(message), current_stream(buffer.device)
        if steps is None:
            self._gloo.allreduce([buffer]).wait()
        else:  # on an accelerator, a copy on the host is sent
            host = buffer.cpu()
            self._steps.carry_out(host, message.kind, steps, message.depth)
            if stream is not None:
                buffer.copy_(host)
        if stream is not None:  # needed because no stream of the training waits for this one
            stream.synchronize()


def _steps_of(message: Message) -> str | None:
    """Return the name of the collective that runs a message in rounds; None for gloo's own all-reduce."""
    if message.collective in COLLECTIVES:
        return message.collective
    return None if message.kind == "all_reduce" else _OWN


class _QueuedWork:
    """A message in the queue of the thread, with the methods of torch's `Work`."""

    def __init__(self, future: Future[None]) -> None:
        self._future = future

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait until the message is done. Raises `RuntimeError` if it fails, or is not done within `timeout`."""
        try:
            self._future.result(timeout.total_seconds() if timeout else None)
        except _Timeout:
            raise RuntimeError("not done in time") from None
        return True

    def is_completed(self) -> bool:
        return self._future.done()

    def get_future(self) -> Future[None]:
        return self._future


_Job = tuple[Future[None], Callable[[], None]]


def _serve(jobs: queue.SimpleQueue[_Job | None]) -> None:
    """Run one job after another, on the thread, until the queue yields None."""
    while (job := jobs.get()) is not None:
        future, do = job
        try:
            do()
        except BaseException as error:  # raised again by the code that waits for the message
            future.set_exception(error)
        else:
            future.set_result(None)
        del job, future, do  # otherwise the thread would keep its channel alive while it waits


def _end(jobs: queue.SimpleQueue[_Job | None], thread: threading.Thread, failed: threading.Event) -> None:
    jobs.put(None)
    if not failed.is_set() and thread is not threading.current_thread():
        thread.join()


def _gloo(group: Any, timeout: timedelta) -> Any:
    """Return a separate gloo backend between the ranks of a group."""
    interfaces = [name for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name]
    store = PrefixStore(f"legato/{group.group_name}", default_store())
    with batch_policy_threads():
        return new_gloo(store, group.rank(), group.size(), timeout, interfaces)
