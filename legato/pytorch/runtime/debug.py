"""Debug mode: what the runtime promises, checked at run time (`LEGATO_DEBUG=1`, or `debug=` of `distribute`).

[Note: checks] The k-th message that a rank hands over must be the k-th of every
rank, in the same iteration. The proof is in docs/runtime.md; it assumes that
all ranks run the same sending backward passes, which a script can break (a
batch skipped on one rank). With `order`, each rank writes into the job's store
what it is about to hand over, and reads what the others wrote, before anything
goes out: a message that differs is named instead of sent. Ranks must run
equally many forward passes in training for it. With `finite`, a gradient that
is not finite is reported the same way, by rank and parameter. Both cost some
round trips to the store for every message, and keep the ranks in step.
"""

from __future__ import annotations

import json
import os
from datetime import timedelta
from typing import Any

import torch
from torch.distributed.distributed_c10d import _get_default_store

from legato.core.errors import RankError, unknown_name
from legato.pytorch.network.watchdog import Watchdog
from legato.pytorch.runtime.buckets import Bucket

__all__ = ["CHECKS", "DebugChecks", "chosen_checks"]

CHECKS = ("order", "finite")


def chosen_checks(debug: bool | str | None) -> tuple[str, ...]:
    """The checks that were asked for: `True`, or names with commas; None asks `$LEGATO_DEBUG`.

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
    """Compares what the ranks of a group are about to hand over."""

    def __init__(self, names: tuple[str, ...], group: Any, timeout: timedelta) -> None:
        self._finite = "finite" in names
        self._rank, self._size = group.rank(), group.size()
        store: Any = _get_default_store().clone()  # type: ignore[attr-defined]
        store.set_timeout(timeout)
        self._store = torch._C._distributed_c10d.PrefixStore(f"legato/checks/{group.group_name}", store)
        self._count = 0

    def check(self, bucket: Bucket, passes: int, forwards: int, watchdog: Watchdog) -> None:
        """This rank is about to hand over `bucket`; raises `RankError` on every rank if any of them has another one."""
        message = (
            f"message {bucket.index} ({bucket.label}) of backward pass {passes}, {bucket.buffer.nbytes} bytes, "
            f"after {forwards} forward passes"
        )
        trouble = ""
        if self._finite:
            wrong = (p.slot.name for p in bucket.slices if p.slot.has_grad and not p.view.isfinite().all())
            trouble = next((f"the gradient of {name} is not finite, {message}" for name in wrong), "")
        try:
            self._compare(message, trouble)
        except RankError as error:
            raise watchdog.failure("a check failed", error) from error

    def _compare(self, message: str, trouble: str) -> None:
        self._count += 1
        keys = [f"{self._count}/{r}" for r in range(self._size)]
        self._store.set(keys[self._rank], json.dumps([message, trouble]))
        try:
            self._store.wait(keys)
        except RuntimeError as error:
            late = [r for r, key in enumerate(keys) if not self._store.check([key])]
            raise RankError(
                f"rank {late[0] if late else '?'} hands nothing over where rank {self._rank} hands over {message}"
            ) from error
        everyones = [json.loads(self._store.get(key)) for key in keys]
        if self._count > 1:
            self._store.delete_key(f"{self._count - 1}/{self._rank}")
        for rank, (theirs, _) in enumerate(everyones):
            if theirs != everyones[0][0]:
                raise RankError(f"rank {rank} hands over {theirs}, where rank 0 hands over {everyones[0][0]}")
        for rank, (_, wrong) in enumerate(everyones):
            if wrong:
                raise RankError(f"rank {rank}: {wrong}")
