"""PyTorch's DistributedDataParallel: the buckets that DDP forms, and how to make DDP form better buckets.

DDP fills buckets with the gradients, in the order in which these became ready in the first iteration. A bucket is
closed as soon as its size reaches its cap. By default, the cap of the first bucket is 1 MiB, and the cap of every other
bucket is 25 MiB. `bucket_cap_mb_list` (PyTorch 2.13) sets each cap, and its last cap applies to all further buckets.
Buckets are sent in the order in which they were filled, and no forward op overlaps with them.

The rules above describe DDP after it has rebuilt its buckets, which happens in the second iteration, in the third with
`static_graph`, and never with `find_unused_parameters`.

Deviation: DDP never mixes dtypes or devices in a bucket, and counts caps for each dtype and device separately. A
workload does not record dtypes and devices, so a single dtype and device are assumed.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from legato.core.cluster import Cluster
from legato.core.errors import InputError, PlanError
from legato.core.plan import Plan
from legato.core.workload import Workload
from legato.schedule.basics.compose import compose, message_limit, message_of, ready_order, resolve_collective

__all__ = ["BUCKET_BYTES", "FIRST_BUCKET_BYTES", "bucket_caps", "ddp"]

_MIB = 2**20
#: DDP's default caps: for the first bucket, and for all other buckets.
FIRST_BUCKET_BYTES = 1 * _MIB
BUCKET_BYTES = 25 * _MIB


def ddp(
    workload: Workload,
    cluster: Cluster,
    *,
    collective: str | None = None,
    first_bucket_bytes: int | None = None,
    bucket_bytes: int | None = None,
    bucket_cap_mb_list: Sequence[float] | None = None,
    max_message_bytes: int | None = None,
) -> Plan:
    """Return a plan that sends each of DDP's buckets as one message.

    `bucket_bytes` and `first_bucket_bytes` are caps in bytes. As in DDP, `bucket_bytes` is also the cap of the first
    bucket unless `first_bucket_bytes` is given. `bucket_cap_mb_list` is DDP's argument of this name, in MiB, and cannot
    be combined with the other two options. A bucket is closed when it reaches its cap. A bucket is closed earlier if
    the next tensor would make it larger than `max_message_bytes`; a tensor above this limit has a bucket of its own.
    Stock DDP forms the same buckets with the caps that `bucket_caps` returns. Raises `InputError` if a cap is not above
    zero or the limit is below 16 bytes.
    """
    name, most = resolve_collective(cluster, collective), message_limit(max_message_bytes)
    if bucket_cap_mb_list is not None:
        if bucket_bytes is not None or first_bucket_bytes is not None:
            raise InputError("bucket_cap_mb_list: given together with bucket_bytes (expected one of them)")
        if not bucket_cap_mb_list or not all(math.isfinite(cap) for cap in bucket_cap_mb_list):
            raise InputError(f"bucket_cap_mb_list: {list(bucket_cap_mb_list)} (expected at least one finite size)")
        caps = [int(cap * _MIB) for cap in bucket_cap_mb_list]
    else:
        rest = BUCKET_BYTES if bucket_bytes is None else bucket_bytes
        first = FIRST_BUCKET_BYTES if bucket_bytes is None else rest
        caps = [first if first_bucket_bytes is None else first_bucket_bytes, rest]
    if min(caps) < 1:
        raise InputError(f"bucket of {min(caps)} bytes (expected at least 1)")
    order = ready_order(workload)
    sizes = [workload.tensors[t].nbytes for t in order]
    messages = [message_of(workload, order[start:stop], name) for start, stop in _buckets(sizes, caps, most)]
    return compose("ddp", messages, workload, carrier="ddp")


def _buckets(sizes: Iterable[int], caps: Sequence[int], most: float) -> list[tuple[int, int]]:
    """Return DDP's buckets (`dist._compute_bucket_assignment_by_size`) of at most `most` bytes, as (start, stop).

    A tensor of more than `most` bytes has a bucket of its own.
    """
    buckets: list[tuple[int, int]] = []
    start = stop = held = 0
    for stop, nbytes in enumerate(sizes, start=1):
        if held and held + nbytes > most:
            buckets.append((start, stop - 1))
            start, held = stop - 1, 0
        held += nbytes
        if held >= caps[min(len(buckets), len(caps) - 1)]:
            buckets.append((start, stop))
            start, held = stop, 0
    return buckets if start == stop else [*buckets, (start, stop)]


def bucket_caps(plan: Plan) -> list[float]:
    """Return the `bucket_cap_mb_list` (MiB) that makes stock DDP's buckets equal to this plan's messages.

    Each cap is the exact size of its bucket, so a bucket reaches its cap with its last tensor and not before. Sizes
    below 2**53 bytes are exact in MiB as floats. The caps are correct for models of one dtype, and for plans that merge
    neighbours in DDP's own ready order (as `merge-optimal`, `mg-wfbp`, `fifo` and `single` do) on a workload captured
    from the same model. Raises `PlanError` if buckets cannot do what the plan does, because the plan partitions tensors
    or sends messages other than all-reduces.
    """
    seen = set()
    for i, message in enumerate(plan.messages):
        if message.kind != "all_reduce":
            raise PlanError(
                f"messages[{i}].kind: {message.kind!r} (expected 'all_reduce', which is all that DDP sends)"
            )
        for piece in message.slices:
            if piece.start != 0 or piece.tensor in seen:
                raise PlanError(f"messages[{i}]: {piece.tensor!r} is partitioned (expected whole tensors)")
            seen.add(piece.tensor)
    return [message.nbytes / _MIB for message in plan.messages]
