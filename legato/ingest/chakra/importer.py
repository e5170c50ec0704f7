"""Import Chakra execution traces (MLCommons): a graph of computations and collectives becomes a workload.

[Note: what is taken from a graph] A trace of a GPU has nodes of the host (`is_cpu_op`) and of the device. The device's
nodes are the computation; the host's nodes only tell which thread launched a kernel. Converters let a kernel depend on
host operators, but not on the kernels that produced its inputs, so kernels keep their order. In a trace without a
device, the host's nodes are the computation. Nodes are ordered by their data dependencies, and by their control
dependencies if these are sound; ties are broken by id. Some converters write control dependencies on nodes that are
missing from the file, or let a node depend on itself. In files of these converters, control dependencies only tell
which host operator launched a kernel.

Each all-reduce or reduce-scatter is a gradient, which is ready after the last backward op on which it depends. In a
trace that begins with the backward pass, as legato writes it, the readers of a gradient are the forward ops that depend
on it. In other traces, readers are found by position (see `assemble`).
"""

from __future__ import annotations

import bisect
import functools
import heapq
import itertools
import math
import re
from collections.abc import Sequence
from pathlib import Path

from legato.core.errors import FileError, InputError
from legato.core.text import count
from legato.core.units import format_seconds
from legato.core.workload import Phase
from legato.ingest.assemble import assemble
from legato.ingest.chakra.file import TraceNode, read_nodes
from legato.ingest.chakra.program import MOST_NEEDS, RankGraph, program
from legato.ingest.chakra.schema import COLLECTIVES, COMPUTE, MEMORY, SEND_RECEIVE, TRANSFER
from legato.ingest.names import GRADIENT_KINDS, collective_kind
from legato.ingest.source import Progress, one_line, refusals_name_files, title_of
from legato.ingest.traced import Gradient, Imported, Notes, TracedOp, Whole

__all__ = ["import_chakra", "import_chakra_program"]

_PHASES = ("forward", "backward", "optimizer")
_PHASE_NAMES: tuple[tuple[Phase, re.Pattern[str]], ...] = (
    ("optimizer", re.compile(r"optimi[sz]er|\bupdate\b|_foreach_|adam|sgd", re.IGNORECASE)),
    ("backward", re.compile(r"backward|bwd|\bgrad|_bw_|input_grad|weight_grad|\bBP\b|/grad$", re.IGNORECASE)),
    ("forward", re.compile(r"forward|fwd|_fw_|\bFP\b", re.IGNORECASE)),
)


@refusals_name_files
def import_chakra(
    paths: Sequence[Path], *, name: str | None = None, rank: int | None = None, progress: Progress | None = None
) -> Imported:
    """Import the `.et` files of one or more ranks; the workload describes one of the ranks.

    Raises `FileError` if a file is not a Chakra trace or its dependencies have a cycle, and `InputError` if `rank` is
    not among the files.
    """
    notes = Notes()
    ranks = _ranks(paths)
    chosen = min(ranks) if rank is None else rank
    if chosen not in ranks:
        raise InputError(f"rank {rank} is in none of the files (has {', '.join(map(str, sorted(ranks)))})")
    graphs = {r: read_nodes(path, progress) for r, path in ranks.items()}
    collectives = {r: [_kind_and_size(n) for n in nodes if _is_transfer(n)] for r, nodes in graphs.items()}
    for r, found in collectives.items():
        if sorted(map(str, found)) != sorted(map(str, collectives[chosen])):
            raise FileError(f"{ranks[r]}: other collectives than in {ranks[chosen]} (expected ranks of one job)")
    graph = _Graph(ranks[chosen], graphs[chosen], notes)
    ops, gradients = graph.ops(), graph.gradients()
    name = name or title_of(ranks[chosen])
    workload = assemble(name, ops, gradients, notes, keep_idle=True, device=graph.device, untraced_s=None)
    return Imported(workload, None, (), notes)


@refusals_name_files
def import_chakra_program(
    paths: Sequence[Path], *, name: str | None = None, progress: Progress | None = None
) -> Imported:
    """Import the program of a job (computation and communication) from the graphs of all ranks.

    Raises `InputError` if the graphs contradict each other, or for a converted profile in which no node depends on the
    kernel of a collective. Also raises the errors of `import_chakra`.
    """
    notes, ranks, graphs = Notes(), _ranks(paths), dict[int, RankGraph]()
    for rank, path in ranks.items():
        graph = _Graph(path, read_nodes(path, progress), notes)
        collectives = {n.id: _kind_and_size(n) for n in graph.order if _is_transfer(n)}
        if graph.streamed and not any(dep in collectives for n in graph.order for dep in n.data_deps):
            raise FileError(
                f"{path}: no node depends on a collective (expected to be told what waits, as kineto tells)"
            )
        graphs[rank] = RankGraph.of(graph.order, graph.computing - collectives.keys(), collectives)
    whole = Whole(program(name or title_of(ranks[min(ranks)]), graphs, notes), notes)
    return Imported(None, None, (), notes, whole=whole)


def _ranks(paths: Sequence[Path]) -> dict[int, Path]:
    """Return the files by rank. A file without a rank in its name (`<prefix>.<rank>.et`) has its index in `paths`."""
    found: dict[int, Path] = {}
    for position, path in enumerate(paths):
        match = re.search(r"\.(\d{1,9})\.et$", path.name)
        rank = int(match.group(1)) if match else position
        if rank in found:
            raise FileError(f"{path}: rank {rank} again (is also {found[rank]})")
        found[rank] = path
    return found


def _is_transfer(node: TraceNode) -> bool:
    return node.type == TRANSFER and ("comm_type" in node.attributes or node.attributes.get("is_cpu_op") is not True)


def _kind_and_size(node: TraceNode) -> tuple[str, int | None]:
    number, size = node.attributes.get("comm_type"), node.attributes.get("comm_size")
    named = isinstance(number, int) and 0 <= number < len(COLLECTIVES)
    kind = COLLECTIVES[int(number)] if named and number is not None else collective_kind(node.name) or "unknown"
    good = isinstance(size, int) and not isinstance(size, bool) and 0 < size < 2**62
    return kind, size if good else None


def _carries_gradients(node: TraceNode) -> bool:
    return _is_transfer(node) and _kind_and_size(node)[0] in GRADIENT_KINDS


class _Graph:
    """One rank's nodes in the order of their dependencies."""

    def __init__(self, path: Path, nodes: list[TraceNode], notes: Notes) -> None:
        self._path, self._notes = path, notes
        self._nodes = {node.id: node for node in nodes}
        self.order = self._sorted(nodes)
        on_device = any(n.attributes.get("is_cpu_op") is False and n.type == COMPUTE for n in nodes)
        self.device = "gpu" if on_device else "cpu"
        self._kept = [n for n in self.order if self._computes(n, on_device)]
        if not self._kept:
            raise FileError(f"{path}: no computation in {count(len(nodes), 'node')} (expected nodes of type {COMPUTE})")
        host = [n for n in nodes if n.type == COMPUTE and n.attributes.get("is_cpu_op") is not False]
        self.streamed = on_device and bool(host)
        if self.streamed:
            seconds = math.fsum(n.micros for n in host) * 1e-6
            notes.lacks(
                "how long the device waited for its host",
                f"the host's {count(len(host), 'operator')} ({format_seconds(seconds)}) take no time",
            )
            notes.lacks("data dependencies between kernels", "each kernel and each transfer needs the kernel before it")
        self._phases = self._phased()
        self._place = {n.id: i for i, n in enumerate(self._kept)}
        self._ids = sorted(self._place)
        self._latest_by_id = list(itertools.accumulate(map(self._place.__getitem__, self._ids), max, initial=0))
        self._needs = self._contracted()

    @functools.cached_property
    def _kept_until(self) -> dict[int, int]:
        kept = itertools.accumulate(int(n.id in self._place) for n in self.order)
        return dict(zip((n.id for n in self.order), kept, strict=True))

    def _computes(self, node: TraceNode, on_device: bool) -> bool:
        if node.type == COMPUTE or node.type in MEMORY:
            return not on_device or node.attributes.get("is_cpu_op") is False
        if node.type in SEND_RECEIVE:
            return True
        # A collective that carries no gradients is an op. An all-gather after a reduce-scatter carries gradients.
        if not _is_transfer(node) or _kind_and_size(node)[0] in GRADIENT_KINDS:
            return False
        return not any(self._scatters(dep) for dep in node.data_deps)

    def _scatters(self, key: int) -> bool:
        node = self._nodes.get(key)
        return node is not None and _is_transfer(node) and _kind_and_size(node)[0] == "reduce_scatter"

    def _sorted(self, nodes: list[TraceNode]) -> list[TraceNode]:
        """Return all nodes in topological order. Raises `FileError` if the data dependencies have a cycle."""
        unknown = sum(d not in self._nodes for n in nodes for d in n.data_deps)
        if unknown:
            self._notes.lacks(f"{count(unknown, 'node')} that others depend on", "missing nodes are done at the start")
        if all(d in self._nodes for n in nodes for d in n.ctrl_deps):
            order = self._topological({n.id: {*n.data_deps, *n.ctrl_deps} for n in nodes})
            if len(order) == len(nodes):
                return order
        needs = {n.id: set(n.data_deps) for n in nodes}
        order = self._topological(needs)
        if len(order) < len(nodes):
            cycle = " -> ".join(map(str, self._cycle(needs.keys() - {n.id for n in order})))
            raise FileError(f"{self._path}: the data dependencies have a cycle: {cycle}")
        return order

    def _topological(self, needs: dict[int, set[int]]) -> list[TraceNode]:
        """Return nodes in topological order (Kahn's algorithm, ties by id), without cycles and what depends on them."""
        left: dict[int, int] = {}
        feeds: dict[int, list[int]] = {}
        for key, deps in needs.items():
            known = deps & self._nodes.keys()
            left[key] = len(known)
            for dep in known:
                feeds.setdefault(dep, []).append(key)
        ready = [key for key, count in left.items() if not count]
        heapq.heapify(ready)
        order = []
        while ready:
            here = heapq.heappop(ready)
            order.append(self._nodes[here])
            for after in feeds.get(here, ()):
                left[after] -= 1
                if not left[after]:
                    heapq.heappush(ready, after)
        return order

    def _cycle(self, stuck: set[int]) -> list[int]:
        """Return the ids of the nodes of one cycle, at most eight."""
        at, path = min(stuck), dict[int, int]()
        while at not in path:
            path[at] = len(path)
            at = next(d for d in self._nodes[at].data_deps if d in stuck)
        found = [*list(path)[path[at] :], at][::-1]
        return found if len(found) <= 8 else [*found[:7], found[-1]]

    def _phased(self) -> dict[int, Phase]:
        """Return the phase of each kept node, by its attribute, or else by its thread, its name or its position."""
        said: dict[int, Phase] = {
            n.id: n.attributes["phase"] for n in self._kept if n.attributes.get("phase") in _PHASES
        }
        if len(said) == len(self._kept):
            return said
        by_thread = self._by_autograd_thread()
        if by_thread is not None:
            self._notes.assume("autograd's thread launches the backward pass; everything later is the optimizer")
            return by_thread
        named = {n.id: p for n in self._kept for p in [_named_phase(n.name)] if p is not None}
        if "backward" in named.values():
            phases: dict[int, Phase] = {}
            current: Phase = "forward"
            for node in self._kept:
                phases[node.id] = current = named.get(node.id, current)
            self._notes.assume(
                "the nodes' names tell the phases of ops; a node whose name tells none has the phase of the one before"
            )
            return phases
        self._notes.lacks("the phases of ops", "the forward pass takes the first third of the computation")
        third, phases = math.fsum(n.micros for n in self._kept) / 3, {}
        for node in self._kept:
            phases[node.id] = "forward" if third > 0 else "backward"
            third -= node.micros
        return phases

    def _by_autograd_thread(self) -> dict[int, Phase] | None:
        """Return each node's phase: backward if it was launched between the ids of autograd's thread (`*_backward`)."""
        threads = {
            n.attributes.get("tid")
            for n in self.order
            if n.attributes.get("is_cpu_op") is True and re.search(r"_backward|Backward\d", n.name)
        }
        ids = [n.id for n in self.order if n.attributes.get("tid") in threads and n.attributes.get("is_cpu_op") is True]
        if not threads or not ids:
            return None
        first, last = min(ids), max(ids)
        phases: dict[int, Phase] = {}
        for node in self._kept:
            launched = next((d for d in node.ctrl_deps if d in self._nodes and d < node.id), node.id)
            phases[node.id] = "forward" if launched < first else "backward" if launched <= last else "optimizer"
        return phases

    def _contracted(self) -> dict[int, set[int]]:
        """Return, for each node, the kept nodes and collectives that it needs, directly or through other nodes."""
        needs: dict[int, set[int]] = {}
        total = 0
        for node in self.order:
            found: set[int] = set()
            for dep in node.data_deps:
                if dep in self._nodes:
                    own = dep in self._place or _carries_gradients(self._nodes[dep])
                    found |= {dep} if own else needs[dep]
            needs[node.id] = found
            total += len(found)
            if total > MOST_NEEDS:
                raise FileError(f"{self._path}: more than {MOST_NEEDS} dependencies through nodes without computation")
        return needs

    @property
    def computing(self) -> set[int]:
        """Return the ids of the kept nodes, without sends and receives."""
        return {node.id for node in self._kept if node.type not in SEND_RECEIVE}

    def ops(self) -> list[TracedOp]:
        """Return the ops with their dependencies."""
        found = []
        for node in self._kept:
            exact = node.attributes.get("duration_s")
            known = isinstance(exact, float) and math.isfinite(exact) and exact >= 0
            seconds = exact if known and exact is not None else node.micros * 1e-6
            deps = None
            if not self.streamed:
                deps = tuple(sorted(self._place[d] for d in self._needs[node.id] if d in self._place))
            found.append(TracedOp(node.name, self._phases[node.id], 0.0, 0.0, seconds, deps=deps))
        return found

    def gradients(self) -> list[Gradient]:
        """Return the gradients that transfers carry. A transfer without a size is left out, with a note."""
        transfers = [n for n in self.order if _carries_gradients(n)]
        found, names, readers = [], set[str](), self._readers()
        for number, node in enumerate(transfers):
            _, size = _kind_and_size(node)
            if size is None:
                self._notes.lacks(f"comm_size of node {node.id} ({one_line(node.name, 60)}): left out")
                continue
            own = node.name if node.attributes.get("phase") and node.name not in names else f"bucket {number:02}"
            names.add(own)
            found.append(Gradient(own, size, self._ready_after(node), readers.get(node.id)))
        return found

    def _readers(self) -> dict[int, tuple[int, ...]]:
        """Return, for each transfer, the forward ops that need it, if there are any."""
        found: dict[int, list[int]] = {}
        for node in self._kept:
            for dep in self._needs[node.id]:
                if dep not in self._place and self._phases[node.id] == "forward":
                    found.setdefault(dep, []).append(self._place[node.id])
        return {dep: tuple(readers) for dep, readers in found.items()}

    def _ready_after(self, transfer: TraceNode) -> int:
        """Return the op after which a transfer's gradients are ready."""
        if self.streamed:
            return self._latest_by_id[bisect.bisect_left(self._ids, transfer.id)]
        before = (self._place[d] for d in self._needs[transfer.id] if d in self._place)
        ready = max((i for i in before if self._phases[self._kept[i].id] == "backward"), default=None)
        if ready is not None:
            return ready
        self._notes.lacks(
            "what some gradient transfers depend on", "such transfers are ready when the ops before them are done"
        )
        return self._kept_until[transfer.id] - 1


def _named_phase(name: str) -> Phase | None:
    return next((phase for phase, pattern in _PHASE_NAMES if pattern.search(name)), None)
