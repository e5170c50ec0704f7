"""The cost of an all-reduce, from the collectives in a trace or from the output of nccl-tests."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Sequence
from pathlib import Path

from legato.core.cluster import Cluster, LinearCost
from legato.core.errors import FileError, InputError
from legato.core.text import count
from legato.core.units import format_seconds
from legato.ingest.source import one_line, read_all
from legato.ingest.traced import Imported, Notes

__all__ = ["cluster_of", "doubt", "read_nccl_tests"]

#: No network within a data center takes longer for one step of a tree, or of a ring (of many workers), or carries less.
_SLOWEST_STEP_S, _SLOWEST_OF_MANY_S = 500e-6, 100e-6
_LEAST_BITS_PER_S = 100e6

_RANK = re.compile(r"#\s+Rank\s+\d+\s")
_TEST = re.compile(r"#.*?\b(\w+)_perf\b")


def cluster_of(imported: Imported, workers: int | None = None) -> Cluster:
    """Fit the cost of an all-reduce to those of a job's traces, in the group that shares gradients if they tell it.

    Of all that carry the same bytes the median counts, without their waits for
    late ranks. If these are not known, the fastest counts, because they only add
    to its time. `workers` is used if the traces do not tell their number. Raises
    `InputError` if they have no all-reduce whose size is known, or if nothing
    tells the number of workers.
    """
    times: dict[int, list[float]] = {}
    group = imported.gradients_group
    for transfer in imported.transfers:
        seconds = transfer.end_s - transfer.start_s - transfer.waited_s
        mine = not group or transfer.group == group
        if transfer.kind == "all_reduce" and mine and transfer.nbytes and seconds > 0:
            times.setdefault(transfer.nbytes, []).append(seconds)
    workers = imported.replicas or workers
    if not times:
        raise InputError("no all-reduce whose size is known (expected one, to fit the cost of the network to)")
    if workers is None:
        raise InputError("the trace does not tell the number of workers (expected --workers)")
    typical = statistics.median if all(m.waiting_s is not None for m in imported.ranks) else min
    points = sorted((nbytes, float(typical(same))) for nbytes, same in times.items())
    return _fitted(points, workers, "traced", imported.notes)


def doubt(cluster: Cluster) -> str:
    """Why a cost that was fitted to a trace is not that of a network; "" if it can be.

    A tree of n workers takes 2 log(n) steps, and a ring 2(n-1), in which each worker sends 2(n-1)/n of the bytes.
    """
    cost, steps = cluster.cost(), 2 * (cluster.workers - 1)
    longest_s = max(2 * math.ceil(math.log2(cluster.workers)) * _SLOWEST_STEP_S, steps * _SLOWEST_OF_MANY_S)
    if steps and cost.startup_s > longest_s:
        what = f"{format_seconds(cost.startup_s)} however small it is"
    elif steps and cost.beta_s_per_byte > steps / cluster.workers * 8 / _LEAST_BITS_PER_S:
        what = f"{format_seconds(cost.beta_s_per_byte * 2**20)} per MiB"
    else:
        return ""
    return (
        f"an all-reduce between {count(cluster.workers, 'worker')} takes {what}, more than on any network: it waits "
        "for late ranks or for the host"
    )


def _fitted(points: Sequence[tuple[int, float]], workers: int, name: str, notes: Notes) -> Cluster:
    cost = LinearCost.fit(points) if len(points) > 1 else None
    if cost is None or not cost.beta_s_per_byte > 0:
        notes.lacks(
            "all-reduces of sizes that differ enough, with times that grow with them, to tell latency from bandwidth",
            "an all-reduce takes time in proportion to its bytes, as the largest one does",
        )
        nbytes, seconds = points[-1]
        cost = LinearCost(0.0, seconds / nbytes)
    return Cluster(workers=workers, collectives={name: cost})


def read_nccl_tests(path: Path, workers: int | None = None) -> tuple[Cluster, list[tuple[int, float]]]:
    """Fit the cost of an all-reduce to the output of nccl-tests' (or rccl-tests') `all_reduce_perf`.

    Returns the cluster and the (bytes, seconds) samples, in place if the output
    has them. `workers` is the number of ranks; by default it is the number that
    the output lists. Raises `FileError` if the file has no such table.
    """
    text = read_all(path).decode(errors="replace")
    lines = text.splitlines()
    test = next((found.group(1) for line in lines if (found := _TEST.match(line))), "all_reduce")
    if test != "all_reduce":
        raise FileError(f"{path}: output of {one_line(test)}_perf (expected that of all_reduce_perf)")
    heading = next((line.lstrip("# ").split() for line in lines if re.match(r"#\s+size\s+count\s", line)), None)
    if heading is None or "time" not in heading:
        raise FileError(f"{path}: no table of sizes and times (expected the output of nccl-tests)")
    column = max(k for k, word in enumerate(heading) if word == "time")
    samples = [
        (int(words[0]), float(words[column]) * 1e-6)
        for line in lines
        if (words := line.split()) and len(words) == len(heading) and re.fullmatch(r"\d{1,15}", words[0])
        if re.fullmatch(r"\d{1,12}(\.\d+)?", words[column])
    ]
    samples = [(nbytes, seconds) for nbytes, seconds in samples if nbytes > 0 and seconds > 0]
    if len({nbytes for nbytes, _ in samples}) < 2:
        raise FileError(f"{path}: fewer than two sizes were measured (expected at least two)")
    ranks = sum(_RANK.match(line) is not None for line in lines)
    if not (workers or ranks):
        raise FileError(f"{path}: no list of ranks (expected it, or --workers)")
    return Cluster(workers=workers or ranks, collectives={"nccl": LinearCost.fit(samples)}), samples
