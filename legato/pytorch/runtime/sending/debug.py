"""Debug mode: checks the runtime's guarantees during training (`LEGATO_DEBUG=1`, or `debug=` of `distribute`).

`order` checks what the proof in docs/runtime.md assumes. Before a message is launched, each rank tells the other ranks
through the process group's store which message it is about to launch. If the messages differ, an error is raised and
nothing is sent. With `order`, all ranks must run the same number of forward passes in training, because the ranks also
compare their numbers of forward passes. `finite` raises an error on all ranks, before anything is sent, if a gradient
is not finite. `reads` raises an error on a rank if an operator reads a parameter before the parameter's update, and
legato notices the read too late (`waiting.readers`).
"""

from __future__ import annotations

import json
import os
from datetime import timedelta
from typing import Any

from legato.core.errors import RankError, unknown_name
from legato.pytorch.network.watchdog import Watchdog
from legato.pytorch.private.groups import PrefixStore, default_store
from legato.pytorch.runtime.waiting.buckets import Bucket

__all__ = ["CHECKS", "COMPARED", "DebugChecks", "chosen_checks"]

CHECKS = ("order", "finite", "reads")
#: The checks that compare what the ranks are about to send.
COMPARED = ("order", "finite")


def chosen_checks(debug: bool | str | None) -> tuple[str, ...]:
    """Return the names of the checks to run.

    `debug` is True (`order`), False (none), or a string of names separated by commas. If `debug` is None, the value of
    `$LEGATO_DEBUG` is used. Raises `InputError` for an unknown name.

    >>> chosen_checks("order,finite"), chosen_checks(True), chosen_checks(False)
    (('order', 'finite'), ('order',), ())
    """
    if debug is None:
        debug = os.environ.get("LEGATO_DEBUG", "")
    text = {True: "1", False: ""}[debug] if isinstance(debug, bool) else debug
    names = tuple(n.strip() for n in text.split(",") if n.strip() not in ("", "0"))
    for name in names:
        if name not in (*CHECKS, "1"):
            raise unknown_name("check", name, CHECKS)
    return tuple(dict.fromkeys("order" if n == "1" else n for n in names))


class DebugChecks:
    """Checks that compare what the ranks of a group are about to send."""

    def __init__(self, names: tuple[str, ...], group: Any, timeout: timedelta) -> None:
        self._finite = "finite" in names
        self._rank, self._size = group.rank(), group.size()
        store: Any = default_store().clone()
        store.set_timeout(timeout)
        self._store = PrefixStore(f"legato/checks/{group.group_name}", store)
        self._count = 0

    def check(self, bucket: Bucket, passes: int, forwards: int, watchdog: Watchdog) -> None:
        """Run the checks for a bucket that this rank is about to launch.

        `passes` and `forwards` count backward and forward passes in training. Raises `RankError` on every rank if any
        rank is about to launch a different message, or has a gradient that is not finite.
        """
        message = (
            f"message {bucket.index} ({bucket.label}) of backward pass {passes}, {bucket.buffer.nbytes} bytes, "
            f"after {forwards} forward passes"
        )
        problem = ""
        if self._finite:
            wrong = (p.slot.name for p in bucket.slices if p.slot.has_grad and not p.view.isfinite().all())
            problem = next((f"the gradient of {name} is not finite, {message}" for name in wrong), "")
        try:
            self._compare(message, problem)
        except RankError as error:
            raise watchdog.failure("a check failed", error) from error

    def _compare(self, message: str, problem: str) -> None:
        self._count += 1
        keys = [f"{self._count}/{r}" for r in range(self._size)]
        self._store.set(keys[self._rank], json.dumps([message, problem]))
        try:
            self._store.wait(keys)
        except RuntimeError as error:
            late = [r for r, key in enumerate(keys) if not self._store.check([key])]
            raise RankError(
                f"rank {late[0] if late else '?'} sends nothing, where rank {self._rank} sends {message}"
            ) from error
        found = [json.loads(self._store.get(key)) for key in keys]
        if self._count > 1:
            self._store.delete_key(f"{self._count - 1}/{self._rank}")
        for rank, (theirs, _) in enumerate(found):
            if theirs != found[0][0]:
                raise RankError(f"rank {rank} sends {theirs}, where rank 0 sends {found[0][0]}")
        for rank, (_, theirs) in enumerate(found):
            if theirs:
                raise RankError(f"rank {rank}: {theirs}")
