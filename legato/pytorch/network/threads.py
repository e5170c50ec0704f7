"""Threads that wait for bytes, and the policy by which Linux gives them a core.

[Note: who spins] gloo has a thread that waits for bytes, and another one that
works on them. Where the second holds the lock of a connection, the first does
not sleep: it asks again and again, until the lock is free. If both are on one
core, and bytes come in while the lock is held, Linux lets the first thread
interrupt the second, and it asks until the next tick of the scheduler, for up
to 4 ms. On two cores that happens in almost every message: one of 64 bytes
takes 2 ms instead of 0.2 (or 0.7, of two at once). Threads of the policy
SCHED_BATCH interrupt nobody when they wake up, and so those of our own groups
have it. Nobody needs a right for that. `benchmarks/messages.py` measures it.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

__all__ = ["batch_policy_threads"]


@contextlib.contextmanager
def batch_policy_threads() -> Iterator[None]:
    """Threads that are started in here have the policy SCHED_BATCH, where this thread has the ordinary one (Linux)."""
    try:
        changed = os.sched_getscheduler(0) == os.SCHED_OTHER
        if changed:
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    except (AttributeError, OSError):  # another system, or a sandbox: gloo is as slow as it always is there
        changed = False
    try:
        yield
    finally:
        if changed:
            os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
