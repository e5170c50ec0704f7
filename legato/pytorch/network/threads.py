"""The scheduling policy of gloo's threads on Linux.

[Note: spinning threads] One thread of gloo waits for bytes, and another thread processes them. While the second thread
holds the lock of a connection, the first does not sleep but spins until the lock is free. If both threads run on one
core and bytes arrive while the lock is held, Linux lets the first thread preempt the second. The first thread then
spins until the next tick of the scheduler, for up to 4 ms. On two cores this happens in almost every message: a message
of 64 bytes takes 2 ms. Without preemption, the message takes 0.2 ms, or 0.7 ms if another message is in flight. Threads
with the policy SCHED_BATCH do not preempt others when they wake up, so legato's own groups use it. No privileges are
needed. `benchmarks/messages.py` measures the effect.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

__all__ = ["batch_policy_threads"]


@contextlib.contextmanager
def batch_policy_threads() -> Iterator[None]:
    """Give threads that start in this context the policy SCHED_BATCH, on Linux.

    Nothing happens if this thread does not have the default policy.
    """
    try:
        changed = os.sched_getscheduler(0) == os.SCHED_OTHER
        if changed:
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    except (AttributeError, OSError):  # another system, or a sandbox: gloo keeps its default speed
        changed = False
    try:
        yield
    finally:
        if changed:
            os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
