"""The way out for messages, one after another.

[Note: one at a time] A plan's order means something only if a message has the
network to itself. gloo works on two collectives at once by default, and so the
least urgent message of a plan would slow down the one before it. Messages
therefore go through a gloo of our own with one thread, which starts the next
one as soon as the one before has ended, with no Python in between. Other
backends (NCCL) keep the order by themselves.

[Note: steps] A collective that is made of sends and receives needs somebody to
make its next step when bytes come in. That is one thread of Python, started by
the first such message, which takes messages one after another in the order in
which they were handed over. As long as it has some, every message goes to it,
the backend's own all-reduce too; and before its first one it waits for what the
backend still has to do. So there is one order, whoever carries a message out,
and a plan of the backend's own all-reduces never meets a thread. The thread
ends with the channel. A process that ends waits for it, unless a message has
failed: a send to a rank that is gone can take all of its time to find out.

[Note: halves] gloo's own reduce-scatter is an all-reduce, most of whose result
it throws away. Halves of an all-reduce are therefore made of steps over gloo: a
ring's, where the plan names no other collective.
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
from torch.distributed.distributed_c10d import _get_default_store

from legato.core.errors import PlanError
from legato.core.plan import Message
from legato.pytorch.network.collectives import Collectives
from legato.pytorch.network.rounds import ROUNDS
from legato.pytorch.network.threads import batch_policy_threads

__all__ = ["Channel", "channel_for"]

#: The collective whose halves stand for a backend's own.
_OWN_HALVES = "ring"
_KINDS = ("all_reduce", "reduce_scatter", "all_gather")


class Channel(Protocol):
    """Hands messages over to be carried out in that order."""

    def __call__(self, buffer: Tensor, message: Message) -> Any:
        """Carry out the message on a flat buffer, in place, and return the work to wait for."""

    def check(self, message: Message, name: str) -> None:
        """Raise `PlanError` unless this channel can carry out such a message, which goes by that name."""

    def give_up(self) -> None:
        """A message has failed: nothing that is still on its way keeps the process from ending."""


def channel_for(group: Any) -> Channel:
    """The channel for a process group, which has one at most; all of its ranks have to call this."""
    return _GlooChannel(group) if group.name() == "gloo" else _BackendChannel(group)


def _check_kind(message: Message, name: str) -> None:
    if message.kind not in _KINDS:
        raise PlanError(f"{name}.kind: {message.kind!r} (expected {', '.join(map(repr, _KINDS))})")


class _BackendChannel:
    """A backend that keeps the order by itself, and has halves of its own."""

    def __init__(self, group: Any) -> None:
        self._group = group

    def check(self, message: Message, name: str) -> None:
        _check_kind(message, name)
        if message.collective in ROUNDS or message.depth > 1:
            raise PlanError(
                f"{name}.collective: {message.collective!r}, depth {message.depth} (expected the own one of "
                f"{self._group.name()}: others are made of steps, over gloo only)"
            )

    def give_up(self) -> None:
        """There is nothing of ours under way."""

    def __call__(self, buffer: Tensor, message: Message) -> Any:
        group = self._group
        if message.kind == "all_reduce":
            return dist.all_reduce(buffer, group=group, async_op=True)
        own = buffer.chunk(group.size())[group.rank()]
        if message.kind == "reduce_scatter":
            return dist.reduce_scatter_tensor(own, buffer, group=group, async_op=True)
        return dist.all_gather_into_tensor(buffer, own, group=group, async_op=True)


class _GlooChannel:
    """A gloo with one thread, and a thread of ours for what is made of steps."""

    def __init__(self, group: Any) -> None:
        timeout = group._get_backend(torch.device("cpu")).options._timeout
        self._gloo = _gloo(group, timeout)
        self._steps = Collectives(self._gloo, timeout)
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._failed = threading.Event()
        self._thread: threading.Thread | None = None
        self._last: Any = None  # what was handed over last

    def check(self, message: Message, name: str) -> None:
        _check_kind(message, name)
        if _steps_of(message) is None and message.depth > 1:
            raise PlanError(f"{name}.depth: {message.depth} (expected 1 with gloo's own all-reduce)")
        if message.collective not in (None, *ROUNDS) and message.collective not in dist.Backend.backend_list:
            known = ", ".join(["gloo", *ROUNDS])
            raise PlanError(f"{name}.collective: {message.collective!r} (this runtime carries out {known})")

    def __call__(self, buffer: Tensor, message: Message) -> Any:
        busy = isinstance(self._last, _QueuedWork) and not self._last.is_completed()
        if _steps_of(message) is None and not busy and not self._failed.is_set():
            self._last = self._gloo.allreduce([buffer])
        else:
            written = torch.cuda.current_stream(buffer.device).record_event() if buffer.is_cuda else None
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
        """On the thread: after all that was handed over earlier."""
        if self._failed.is_set():
            raise RuntimeError("not sent, for a message before it has failed")
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
        steps = _steps_of(message)
        if steps is None:
            self._gloo.allreduce([buffer]).wait()
        elif buffer.is_cuda:
            host = buffer.cpu()
            self._steps.carry_out(host, message.kind, steps, message.depth)
            buffer.copy_(host)
            torch.cuda.current_stream(buffer.device).synchronize()
        else:
            self._steps.carry_out(buffer, message.kind, steps, message.depth)


def _steps_of(message: Message) -> str | None:
    """The collective whose rounds a message takes; None: gloo's own all-reduce."""
    if message.collective in ROUNDS:
        return message.collective
    return None if message.kind == "all_reduce" else _OWN_HALVES


class _QueuedWork:
    """A message that the thread has to carry out, with the face of torch's `Work`."""

    def __init__(self, future: Future[None]) -> None:
        self._future = future

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Until it is done, or failed, or for so long. Raises `RuntimeError` in the latter two cases."""
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
    """The thread: one job after another, until there is a None."""
    while (job := jobs.get()) is not None:
        future, do = job
        try:
            do()
        except BaseException as error:  # whoever waits for the message gets it
            future.set_exception(error)
        else:
            future.set_result(None)
        del job, future, do  # or the thread would keep its channel alive while it waits


def _end(jobs: queue.SimpleQueue[_Job | None], thread: threading.Thread, failed: threading.Event) -> None:
    jobs.put(None)
    if not failed.is_set() and thread is not threading.current_thread():
        thread.join()


def _gloo(group: Any, timeout: timedelta) -> Any:
    """A gloo of our own between the ranks of a group."""
    backend: Any = dist.ProcessGroupGloo
    options = backend._Options()
    options._threads = 1
    options._timeout = timeout
    interfaces = [name for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name]
    with batch_policy_threads():
        options._devices = [backend.create_device(interface=name) for name in interfaces] or [
            backend.create_default_device()
        ]
    store = torch._C._distributed_c10d.PrefixStore(f"legato/{group.group_name}", _get_default_store())
    return backend(store, group.rank(), group.size(), options)
