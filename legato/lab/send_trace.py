"""Read and write the five-column send trace of the Network Operator Edition (section 5).

A send trace is a CSV file with the header `time_s,parameter,size_bytes,source,destination`. A row has the time at which
a parameter was ready to be sent, the parameter's name (an edge of TensorFlow's graph), its size, and the two devices.
Sends from workers to parameter servers form the aggregation trace, and sends from servers to workers form the
distribution trace. The two kinds of traces may be in one file or in several.

As in the paper, the times of an aggregation trace are relative to its first event, so the backward time of the first
gradient is missing. Only the order of the distribution trace counts, because its times depend on the network. `after`
is the paper's dependency operation: whatever a worker sends up to this operation belongs to the forward pass and is not
a gradient. The moving means and variances of batch normalization are always left out. `drop` leaves out other
parameters, such as auxiliary logits.
"""

from __future__ import annotations

import csv
import io
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from legato.core.errors import FileError, InputError
from legato.core.text import count
from legato.core.workload import Op, Tensor, Workload
from legato.ingest.source import Progress, one_line, read_all, refusals_name_files, title_of
from legato.ingest.traced import Imported, Notes

__all__ = ["Send", "export_send_trace", "import_send_trace", "read_send_trace"]

_COLUMNS = ("time_s", "parameter", "size_bytes", "source", "destination")
#: Running statistics, which are sent with the gradients but not trained.
_STATISTICS = re.compile(r"moving_(mean|variance)|running_(mean|var)\b|num_batches_tracked")
_SERVER = re.compile(r"(^|[^a-z])(ps|server|parameter_?server)s?(?![a-z])", re.IGNORECASE)


class Send(NamedTuple):
    """One send operation."""

    time_s: float
    parameter: str
    nbytes: int
    source: str
    destination: str

    @property
    def aggregates(self) -> bool:
        """Return whether the transfer goes from a worker to a server."""
        return bool(_SERVER.search(self.destination)) and not _SERVER.search(self.source)

    @property
    def distributes(self) -> bool:
        """Return whether the transfer goes from a server to a worker."""
        return bool(_SERVER.search(self.source)) and not _SERVER.search(self.destination)


def read_send_trace(path: Path, progress: Progress | None = None) -> list[Send]:
    """Return the rows of one file. Raises `FileError`, which names the line and the column."""
    try:
        text = read_all(path, progress).decode("utf-8-sig")
        rows = list(csv.reader(io.StringIO(text), strict=True))
    except UnicodeDecodeError as error:
        raise FileError(f"{path}: not UTF-8: {error.reason} at byte {error.start}") from None
    except csv.Error as error:
        raise FileError(f"{path}: not CSV: {one_line(str(error))}") from None
    if not rows or tuple(cell.strip() for cell in rows[0]) != _COLUMNS:
        found = one_line(",".join(rows[0]), 60) if rows else "nothing"
        raise FileError(f"{path}: line 1: {found} (expected {','.join(_COLUMNS)})")
    return [_send(path, line, row) for line, row in enumerate(rows[1:], start=2) if row]


def _send(path: Path, line: int, row: list[str]) -> Send:
    if len(row) != len(_COLUMNS):
        raise FileError(f"{path}: line {line}: {len(row)} columns (expected {len(_COLUMNS)})")
    time, parameter, size, source, destination = (cell.strip() for cell in row)
    try:
        moment = float(time)
    except ValueError:
        moment = math.nan
    if not abs(moment) < 1e12:
        raise FileError(f"{path}: line {line}: time_s: {one_line(time, 40)} (expected seconds)")
    if not (size.isascii() and size.isdecimal() and len(size) < 18 and int(size) > 0):
        raise FileError(
            f"{path}: line {line}: size_bytes: {one_line(size, 40)} (expected a whole number of bytes above 0)"
        )
    for column, cell in (("parameter", parameter), ("source", source), ("destination", destination)):
        if not cell:
            raise FileError(f"{path}: line {line}: {column}: empty (expected a name)")
    return Send(moment, parameter, int(size), source, destination)


@refusals_name_files
def import_send_trace(
    paths: Sequence[Path],
    *,
    name: str | None = None,
    forward_s: float | None = None,
    worker: str | None = None,
    after: str | None = None,
    drop: Sequence[str] | None = None,
    progress: Progress | None = None,
) -> Imported:
    """Import an aggregation trace and, if there is one, a distribution trace.

    Each time between two sends of one worker becomes a backward op. The trace has no forward pass, so `forward_s` is
    measured separately, as in the paper. Raises `FileError` for a file that is not a send trace, and `InputError` if no
    gradient is left or a parameter is sent twice.
    """
    notes = Notes()
    sends = [send for path in paths for send in read_send_trace(path, progress)]
    mine = _worker(paths[0], sends, worker)
    gradients = _aggregation([s for s in sends if s.aggregates and s.source == mine], after, _patterns(drop))
    order = _distribution([s for s in sends if s.distributes and s.destination == mine], gradients, notes)
    backward_s = gradients[-1].time_s - gradients[0].time_s
    if forward_s is None:
        forward_s = backward_s / 2
        notes.lacks("the forward pass (--forward)", "the forward pass takes half as long as the backward pass")
    notes.lacks("the forward time of each layer", "all layers take the same time")
    notes.lacks("the time of the first backward op", "the first backward op takes no time")
    return Imported(_workload(name or title_of(paths[0]), gradients, order, forward_s), None, (), notes)


def _worker(path: Path, sends: list[Send], wanted: str | None) -> str:
    """Return the worker `wanted`, or the first worker if it is None; check that this worker sends to a server."""
    workers = list(dict.fromkeys(s.source for s in sends if s.aggregates))
    if not workers:
        raise FileError(
            f"{path}: no sends from a worker to a server (expected devices with names like worker0 and ps0)"
        )
    if wanted is not None and wanted not in workers:
        raise InputError(f"no worker {one_line(wanted, 40)!r} (has {one_line(', '.join(workers))})")
    return wanted or workers[0]


def _patterns(drop: Sequence[str] | None) -> list[re.Pattern[str]]:
    try:
        return [_STATISTICS, *(re.compile(pattern) for pattern in drop or ())]
    except (re.error, RecursionError, OverflowError) as error:
        raise InputError(f"--drop: not a regular expression: {one_line(str(error))}") from None


def _aggregation(sends: list[Send], after: str | None, drop: list[re.Pattern[str]]) -> list[Send]:
    """Return the gradients of one worker, sorted by time and filtered as in section 5."""
    if after is not None:
        moments = [s.time_s for s in sends if _plain(s.parameter) == _plain(after)]
        if not moments:
            raise InputError(f"--after {one_line(after, 60)!r}: no such operation among the worker's sends")
        sends = [s for s in sends if s.time_s > moments[0]]
    kept = sorted((s for s in sends if not any(p.search(s.parameter) for p in drop)), key=lambda s: s.time_s)
    if not kept:
        raise InputError("no gradients are left in the aggregation trace (see --after and --drop)")
    seen = set()
    for send in kept:
        if (plain := _plain(send.parameter)) in seen:
            raise InputError(f"{one_line(plain, 60)!r} is sent twice (expected one iteration of one worker)")
        seen.add(plain)
    return kept


def _plain(parameter: str) -> str:
    """Return a parameter's name without suffixes of TensorFlow's edges: `conv1/weights` for `conv1/weights/read`."""
    return re.sub(r"^gradients/|/(read|Identity|grad)(:\d+)?$", "", parameter)


def _distribution(sends: list[Send], gradients: list[Send], notes: Notes) -> list[str]:
    """Return the parameters in the order in which the forward pass reads them."""
    wanted = [_plain(s.parameter) for s in gradients]
    if not sends:
        notes.lacks(
            "the distribution trace", "the forward pass reads parameters in the reverse of the gradients' order"
        )
        return wanted[::-1]
    seen = list(dict.fromkeys(_plain(s.parameter) for s in sorted(sends, key=lambda s: s.time_s)))
    order = [parameter for parameter in seen if parameter in set(wanted)]
    rest = [parameter for parameter in wanted[::-1] if parameter not in set(order)]
    if rest:
        notes.lacks(
            f"{count(len(rest), 'parameter')} of the distribution trace", "the forward pass reads these parameters last"
        )
    return order + rest


def _workload(name: str, gradients: list[Send], order: list[str], forward_s: float) -> Workload:
    count = len(gradients)
    ops = [Op(f"{p}/forward", "forward", forward_s / count, (i - 1,) if i else ()) for i, p in enumerate(order)]
    before = gradients[0].time_s
    tensors = []
    reader = {parameter: i for i, parameter in enumerate(order)}
    for i, send in enumerate(gradients):
        plain = _plain(send.parameter)
        ops.append(Op(f"{plain}/backward", "backward", send.time_s - before, (count + i - 1,)))
        tensors.append(Tensor(plain, send.nbytes, count + i, (reader[plain],)))
        before = send.time_s
    return Workload(name, tuple(ops), tuple(tensors), 1, "trace")


def export_send_trace(workload: Workload, workers: int, servers: int) -> str:
    """Return the aggregation trace and the distribution trace of a workload as one CSV text.

    Each worker sends each gradient when its op has finished, with the backward pass on one stream. Parameters are
    assigned to the servers round robin, in the order of their first use, and distributed in this order at time 0.
    """
    if workers < 1 or servers < 1:
        raise InputError(f"{count(workers, 'worker')} and {count(servers, 'server')} (expected at least 1 of each)")
    ready, clock = dict[int, float](), 0.0
    for i in workload.phase_ops("backward"):
        clock += workload.ops[i].duration_s
        ready[i] = clock
    made = sorted(workload.tensors, key=lambda tensor: ready[tensor.ready_after])
    used = sorted(workload.tensors, key=lambda tensor: min(tensor.readers, default=len(workload.ops)))
    server = {tensor.name: f"ps{i % servers}" for i, tensor in enumerate(used)}
    first = ready[made[0].ready_after]
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(_COLUMNS)
    for w in range(workers):
        writer.writerows((0.0, f"{t.name}/read", t.nbytes, server[t.name], f"worker{w}") for t in used)
    for w in range(workers):
        writer.writerows((ready[t.ready_after] - first, t.name, t.nbytes, f"worker{w}", server[t.name]) for t in made)
    return out.getvalue()
