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
from legato.ingest.source import read_all
from legato.ingest.traced import Imported, Notes

__all__ = ["cluster_of", "doubt", "read_nccl_tests"]

#: Limits within a data center: the longest step of a tree (500 us), the longest step of a ring of many workers (100
#: us), and the lowest bandwidth.
_SLOWEST_STEP_S, _SLOWEST_OF_MANY_S = 500e-6, 100e-6
_LEAST_BITS_PER_S = 100e6

_RANK = re.compile(r"#\s+Rank\s+(\d{1,9})\s")
_TEST = re.compile(
    r"\b(all_reduce|all_gather|reduce_scatter|alltoall|broadcast|gather|scatter|reduce|sendrecv|hypercube)_perf\b"
)
_NUMBER = r"[0-9]{1,12}(\.[0-9]+)?"
_HEADING = re.compile(r"#\s+(?=size\s+count\s)")
_OUT_OF_BOUNDS = re.compile(r"#\s*Out of bounds values\s*:\s*(\d+)\s+FAILED")
#: The tolerance for the ratio of the two bandwidths in a table of an all-reduce, because both are rounded.
_ROUNDED = 0.05


def cluster_of(imported: Imported, workers: int | None = None) -> Cluster:
    """Return a cluster with the cost of an all-reduce fitted to the all-reduces of a traced job.

    If the traces tell which group shares gradients, only this group's all-reduces are used. For each number of bytes,
    the fit uses the median time without waits for late ranks. If the waits are not known, it uses the fastest time,
    because waits only make a collective longer. `workers` is the number of workers, in case the traces do not tell it.
    Raises `InputError` if no traced all-reduce has a known size, or if nothing tells the number of workers.
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
        raise InputError("the trace does not show the number of workers (expected --workers)")
    typical = statistics.median if all(m.waiting_s is not None for m in imported.ranks) else min
    points = sorted((nbytes, float(typical(same))) for nbytes, same in times.items())
    return _fitted(points, workers, "traced", imported.notes)


def doubt(cluster: Cluster) -> str:
    """Return why no network can have the cost that was fitted to a trace; "" if some network can have it.

    A tree of n workers takes 2 log(n) steps. A ring takes 2(n-1) steps, and in each step, each worker sends 1/n of the
    bytes.
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


def read_nccl_tests(path: Path, workers: int | None = None) -> tuple[Cluster, list[tuple[int, float]], int]:
    """Fit the cost of an all-reduce to the output of nccl-tests' (or rccl-tests') `all_reduce_perf`.

    Returns the cluster, the (bytes, seconds) samples (in-place if possible), and the number of ranks that measured them
    (0 if the output does not list the ranks). `workers` is the number of ranks to assume, by default the number in the
    output. Raises `FileError` if the file is not the output of one run of `all_reduce_perf` between several ranks with
    correct results.
    """
    lines = read_all(path).decode(errors="replace").splitlines()  # each line may begin with a prefix from a launcher
    for test in _found(_TEST, lines):
        if test[1] != "all_reduce":
            raise FileError(f"{path}: output of {test[1]}_perf (expected the output of all_reduce_perf)")
    ranks = [int(rank[1]) for rank in _found(_RANK, lines)]
    headings = [heading.string[heading.end() :].split() for heading in _found(_HEADING, lines)]
    if not headings or "time" not in headings[0]:
        raise FileError(f"{path}: no table of sizes and times (expected the output of nccl-tests)")
    if ranks and not any(ranks):
        raise FileError(
            f"{path}: every rank ran alone (expected one run of all: nccl-tests built with MPI=1, and mpirun)"
        )
    if len(headings) > 1:
        raise FileError(f"{path}: {len(headings)} runs, with {ranks.count(0)} lists of ranks (expected one run)")
    workers = workers or len(ranks)
    if not workers:
        raise FileError(f"{path}: no list of ranks (expected it, or --workers)")
    if "redop" not in headings[0]:
        raise FileError(f"{path}: a collective that reduces nothing (expected the output of all_reduce_perf)")
    samples = _samples(path, lines, headings[0], len(ranks) or workers)
    return Cluster(workers=workers, collectives={"nccl": LinearCost.following(samples)}), samples, len(ranks)


def _found(pattern: re.Pattern[str], lines: Sequence[str]) -> list[re.Match[str]]:
    return [found for line in lines if (found := pattern.search(line))]


def _row(line: str, heading: Sequence[str]) -> tuple[int, float, bool, float | None] | None:
    """Return (bytes, seconds, whether all results are right, busbw / algbw) of a table's row; None for other lines."""
    time = max(k for k, word in enumerate(heading) if word == "time")
    columns = len(heading) + heading.count("timestamp")  # a timestamp is two words
    words = [] if "#" in line else line.replace("FAILED", " ").split()[-columns:]
    if len(words) < len(heading) or not re.fullmatch(r"\d{1,15}", words[0]) or not re.fullmatch(_NUMBER, words[time]):
        return None
    wrong = (word for word, column in zip(words, heading, strict=False) if column == "#wrong")
    right = "FAILED" not in line and all(re.fullmatch(r"0+|N/A", word) for word in wrong)
    rates = [float(word) for word in words[time + 1 : time + 3] if re.fullmatch(_NUMBER, word)]
    ratio = rates[1] / rates[0] if len(rates) == 2 and rates[0] >= 1 else None
    return int(words[0]), float(words[time]) * 1e-6, right, ratio


def _samples(path: Path, lines: Sequence[str], heading: Sequence[str], ranks: int) -> list[tuple[int, float]]:
    """Return the sizes and times of a table. Raises `FileError` if results are wrong, or not from an all-reduce."""
    rows = [row for line in lines if (row := _row(line, heading)) is not None]
    for nbytes, _, right, _ in rows:
        if not right:
            raise FileError(f"{path}: wrong results at {count(nbytes, 'byte')} (expected a run in which all are right)")
    for failed in _found(_OUT_OF_BOUNDS, lines):
        raise FileError(f"{path}: {failed[1]} wrong results (expected a run in which all are right)")
    measured = [(nbytes, seconds, ratio) for nbytes, seconds, _, ratio in rows if nbytes > 0 and seconds > 0]
    samples = {nbytes: seconds for nbytes, seconds, _ in measured}
    if len(samples) < 2:
        raise FileError(f"{path}: fewer than two sizes were measured (expected at least two)")
    ratios = [ratio for *_, ratio in measured if ratio is not None]
    of_all_reduce = 2 * (ranks - 1) / ranks
    if ratios and abs(statistics.median(ratios) - of_all_reduce) > _ROUNDED * of_all_reduce:
        raise FileError(
            f"{path}: busbw is {statistics.median(ratios):.3g} x algbw (expected {of_all_reduce:.3g}, as an all-reduce "
            f"between {ranks} ranks has it)"
        )
    return sorted(samples.items())
