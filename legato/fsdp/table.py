"""Compare ways to shard a model by time and memory, and find the simplest way that is nearly the fastest."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypedDict

import msgspec

from legato.core.cluster import Cluster, LinearCost
from legato.core.errors import InputError, unknown_name
from legato.core.files import identity
from legato.core.job import Machine
from legato.core.program import Program
from legato.core.table import Column, Table
from legato.core.text import percent
from legato.core.timeline import Timeline
from legato.core.units import format_bytes, format_seconds
from legato.core.workload import Workload
from legato.core.wrapping import Sync, Wrapping
from legato.fsdp.bound import lower_bound
from legato.fsdp.costs import Costs, Hosts
from legato.fsdp.many import KEEP, NODE, RESHARD, Chain, Layout, evaluate
from legato.fsdp.planner import by_unit, every, fastest
from legato.fsdp.rules import Step, program_of, run
from legato.fsdp.units import Precision, Unit, units_of
from legato.reports.model import MemoryPoint, ModelReport
from legato.schedule import schedule
from legato.simulator.collective import iteration_time

__all__ = [
    "SAME",
    "Comparison",
    "Row",
    "Sharding",
    "ShardingOptions",
    "best",
    "compare",
    "compare_traced",
    "plan_wrapping",
    "program_of_wrapping",
]

#: Rows whose times differ by less than this fraction count as equally fast. The answer is the simplest of the fastest
#: rows.
SAME = 0.01
#: A relative difference of times that is too small to be measured.
_ROUNDING = 1e-3
#: With more parts of blocks than this, groups of parts are not tried.
_MOST_PARTS = 80
_PARTS = "planned, with blocks divided"
#: The memory limits of planned rows, as multiples of the peak of buffers when each unit is a group.
_MULTIPLES = (1.0, 1.5, 2.0)
#: The bytes of an element of the optimizer's states, and the number of states that Adam keeps.
_STATE, _STATES = 4, 2
#: The most micro-batches; each of them is simulated.
_MOST_MICRO_BATCHES = 256
#: Regular groups: the numbers of units in each, and the numbers of last groups that are kept.
_EVERY, _LAST_KEPT = (1, 2, 3, 4, 6, 8), (1, 2, 3)


@dataclass(frozen=True, kw_only=True)
class Sharding:
    """The settings of fully sharded training: the memory of each GPU, the hosts, and the accumulation of gradients.

    `memory_bytes` is for parameters, gradients, two states of the optimizer and FSDP2's buffers, without activations;
    None means no limit. Each host has `gpus_per_host` GPUs, connected by links of `local_bandwidth_bps` bits per
    second, and `gpus_per_card` of them share a network card. The default `precision` is the workload's for gathered
    parameters, and float32 for stored parameters and reduced gradients. `host_s` is the CPU time in seconds for one
    group in a step. A `machine` of whole jobs sets the hosts, cards, links and latencies; the cluster then gives only
    the number of workers. Raises `InputError` on numbers out of range.
    """

    memory_bytes: int | None = None
    gpus_per_host: int = 1
    gpus_per_card: int = 1
    local_bandwidth_bps: float = 100e9
    micro_batches: int = 1
    precision: Precision | None = None
    host_s: float = 0.0
    machine: Machine | None = None

    def __post_init__(self) -> None:
        if self.memory_bytes is not None and self.memory_bytes < 1:
            raise InputError(f"memory_bytes: {self.memory_bytes} (expected at least 1)")
        if not 1 <= self.micro_batches <= _MOST_MICRO_BATCHES:
            raise InputError(f"micro_batches: {self.micro_batches} (expected 1 to {_MOST_MICRO_BATCHES})")
        if not 0 <= self.host_s < math.inf:
            raise InputError(f"host_s: {self.host_s} (expected finite seconds, at least 0)")

    def costs(self, cluster: Cluster, replicas: int = 1) -> Costs:
        """Return the costs on the cluster or, with a machine, on hosts of that machine."""
        if self.machine is not None:
            return Costs.of_machine(self.machine, cluster.workers, replicas=replicas, host_s=self.host_s)
        hosts = Hosts(self.gpus_per_host, self.local_bandwidth_bps, self.gpus_per_card)
        return Costs.of(cluster, hosts, replicas=replicas, host_s=self.host_s)

    def gpus(self, workers: int) -> int:
        """Return the number of ranks that share a host."""
        return self.gpus_per_host if self.machine is None else min(self.machine.gpus_per_host, workers)


class ShardingOptions(TypedDict, total=False):
    """The fields of `Sharding` as keyword arguments, for type checkers."""

    memory_bytes: int | None
    gpus_per_host: int
    gpus_per_card: int
    local_bandwidth_bps: float
    micro_batches: int
    precision: Precision | None
    host_s: float
    machine: Machine | None


class Row(msgspec.Struct, frozen=True):
    """One way to train: its predicted time, and the bytes on each GPU.

    `buffers` is the peak memory of gathered parameters, whole gradients and buffers, which depends on the wrapping
    (FSDP2's groups). `states` is the remaining memory: shards of parameters and of the optimizer's states. `bound_s` is
    a lower bound on the step's time with any other groups that need no more memory, or None if unknown. `wrapping` is
    None for DDP.
    """

    name: str
    seconds: float
    buffers: int
    states: int
    kept: int
    bound_s: float | None
    wrapping: Wrapping | None

    @property
    def nbytes(self) -> int:
        return self.buffers + self.states

    @property
    def gap(self) -> float | None:
        """Return the gap, time / bound - 1, or None without a bound."""
        return self.seconds / self.bound_s - 1 if self.bound_s else None


class Comparison(msgspec.Struct, frozen=True):
    """All rows, the simplest first, and the index of the recommended row (`answer`)."""

    rows: tuple[Row, ...]
    answer: int
    compute_s: float
    steps: tuple[Timeline | None, ...]

    def table(self, title: str) -> Table:
        """Return a table of the rows, sorted by memory."""
        columns = [
            Column("groups", "name"),
            Column("predicted", "seconds", format_seconds),
            Column("over computing", lambda row: row.seconds / self.compute_s, "{:.3f}".format),
            *([Column("memory", "nbytes")] if any(row.states for row in self.rows) else []),
            Column("of it buffers" if any(row.states for row in self.rows) else "buffers", "buffers", format_bytes),
            Column("kept", lambda row: row.kept or None, format_bytes),
            Column("above bound", "gap"),
        ]
        return Table(title, self.by_memory, columns, best=[self.by_memory.index(self.rows[self.answer])])

    @property
    def by_memory(self) -> list[Row]:
        return sorted(self.rows, key=lambda row: row.nbytes)

    def report(self, job: str, where: str) -> ModelReport:
        """Return a page: the curve of time over memory, the table, and the timeline of one rank."""
        points = tuple(
            MemoryPoint(row.name, row.nbytes, row.seconds, row.bound_s, row is self.rows[self.answer])
            for row in self.by_memory
        )
        drawn = () if self.steps[self.answer] is None else (self.timeline(where),)
        several = tuple(one for timeline in drawn for one in (timeline.baseline, timeline) if one is not None)
        told = (f"{self.verdict}. Predicted for {where}.", self.table(f"Ways to shard {job}"))
        return ModelReport(job, timelines=several, told=told, points=points)

    def timeline(self, where: str) -> Timeline:
        """Return the answer's timeline, with the first row's timeline as baseline. `where` is the network in words."""
        chosen, block = self.steps[self.answer], self.steps[0]
        if chosen is None or block is None:
            raise InputError(f"{self.rows[self.answer].name} is the answer: no timeline of a wrapping")
        chosen = msgspec.structs.replace(chosen, network=where)
        if self.answer == 0:
            return chosen
        return msgspec.structs.replace(chosen, baseline=msgspec.structs.replace(block, network=where))

    @property
    def wrapping(self) -> Wrapping:
        """Return the wrapping of the answer or, if the answer is DDP, of the fastest row except DDP's."""
        wrapped = [row.wrapping for row in sorted(self.rows, key=lambda row: row.seconds) if row.wrapping is not None]
        return self.rows[self.answer].wrapping or wrapped[0]

    @property
    def verdict(self) -> str:
        """Return one sentence that says what to do."""
        chosen, block = self.rows[self.answer], next(row for row in self.rows if row.name == BY_BLOCK)
        if chosen is block:
            bound = "" if block.gap is None else f": it is {percent(block.gap)} above the bound for its memory"
            return f"nothing to gain from other groups than one for each block{bound}"
        win = block.seconds / chosen.seconds
        return f"{chosen.name}: {win:.3f}x as fast as one group for each block, in {format_bytes(chosen.nbytes)}"


BY_BLOCK = "by block"


def compare(workload: Workload, cluster: Cluster, sharding: Sharding) -> Comparison:
    """Compare time and memory of the ways to shard a workload on a cluster.

    Raises `InputError` if the memory is too small for every row, and what `units_of` and `Costs.of` raise.
    """
    return _OfWorkload(workload, cluster, sharding).compare()


def compare_traced(
    units: Sequence[Unit], costs: Costs, precision: Precision, traced: Wrapping, update_s: float, node: int | None
) -> Comparison:
    """Compare time and memory of the traced groups (in the first row) and of other groups.

    The optimizer takes `update_s` seconds of a step. Memory counts only FSDP2's buffers, because a trace does not tell
    the rest. Rows that are both slower and larger than the traced groups are left out.
    """
    return _Table(units, costs, precision, node, traced.micro_batches, update_s * costs.ranks, traced).compare()


def program_of_wrapping(workload: Workload, cluster: Cluster, sharding: Sharding, wrapping: Wrapping) -> Program:
    """Return the program of a step under a wrapping that `compare` found; simulators of links need a program."""
    table = _OfWorkload(workload, cluster, sharding)
    costs, units = table.shared(wrapping.replicas)
    known = {unit.path for unit in units}
    if any(path not in known for group in wrapping.groups for path in group.modules):
        units = table.parts
    gpus, update_s = sharding.gpus(cluster.workers), table.optimizer_s / costs.ranks
    return program_of(units, wrapping, costs, table.precision, per_host=gpus, update_s=update_s)


def plan_wrapping(workload: Workload, cluster: Cluster, scheduler: object, **options: Any) -> Wrapping:
    """Return the wrapping for `legato.plan(..., shard="parameters")`.

    Raises `InputError` on an unknown option, and what `compare` raises.
    """
    options.pop("shard")
    if scheduler != "legato":
        raise InputError(f"scheduler: {scheduler!r} with shard 'parameters' (expected none: FSDP2 fixes the order)")
    for name in options:
        if name not in ShardingOptions.__annotations__:
            raise unknown_name("option", name, ShardingOptions.__annotations__)
    return compare(workload, cluster, Sharding(**options)).wrapping


class _Table:
    """The rows for a model of these units, with these costs. The optimizer takes `optimizer_s` for the whole model."""

    def __init__(
        self,
        units: Sequence[Unit],
        costs: Costs,
        precision: Precision,
        node: int | None,
        micro_batches: int = 1,
        optimizer_s: float = 0.0,
        traced: Wrapping | None = None,
    ) -> None:
        self.units, self.costs, self.precision = units, costs, precision
        self.micro_batches, self.optimizer_s, self.traced = micro_batches, optimizer_s, traced
        self.parts: Sequence[Unit] = ()  # the parts of the units
        self.memory_bytes: int | None = None
        self.workload_id = ""
        self.chain = Chain(units, costs, precision, node)
        self.finer: Chain | None = None
        self.steps: dict[str, Timeline] = {}

    @property
    def compute_s(self) -> float:
        one = math.fsum(unit.forward_s + unit.backward_s for unit in self.units)
        return self.micro_batches * one + self.optimizer_s / self.costs.ranks

    def compare(self) -> Comparison:
        rows = self._rows()
        for row in self._planned():
            if not any(_as_good(other, row) for other in rows):
                rows.append(row)
        steps = tuple(self.steps.get(row.name) for row in rows)
        return Comparison(tuple(rows), best(rows, self.memory_bytes), self.compute_s, steps)

    def _rows(self) -> list[Row]:
        if self.traced is None:
            return [*self._plain()]
        traced = self._row(self.traced.name, self.traced, sync=self.traced.sync)
        return [traced, *(row for row in self._plain() if not _as_good(traced, row))]

    def _plain(self) -> Iterator[Row]:
        """Yield the rows of the usual ways to shard without a plan, the simplest first."""
        yield self._row(BY_BLOCK, self.chain.wrapping(by_unit(self.chain), BY_BLOCK))
        if self.chain.node is not None:
            name = f"{BY_BLOCK}, resharded to its host"
            yield self._row(name, self.chain.wrapping(by_unit(self.chain, NODE), name))
        name = "everything kept (ZeRO-2)"
        yield self._row(name, self.chain.wrapping(by_unit(self.chain, KEEP), name))
        if self.micro_batches > 1:
            for name, sync in _ACCUMULATING:
                kept = by_unit(self.chain, KEEP if sync == "gathered-once" else RESHARD)
                yield self._row(name, self.chain.wrapping(kept, name), sync=sync)
        yield self._row("one group", self.chain.wrapping(Layout((0,), (KEEP,)), "one group"))

    def _planned(self) -> Iterator[Row]:
        """Yield the fastest groups within each memory limit; regular groups are preferred if about as fast."""
        limits = self._limits()
        regular = [*_regular(self.chain)]
        seconds, nbytes = evaluate(self.chain, regular)
        for limit, free, parts in zip(limits, fastest(self.chain, limits), self._parts(limits), strict=True):
            fitting = [k for k in range(len(regular)) if nbytes[k] <= limit]
            simple = regular[min(fitting, key=lambda k: (seconds[k], nbytes[k]))] if fitting else None
            found = [(self.chain, layout) for layout in (simple, free) if layout is not None]
            if parts is not None:
                assert self.finer is not None
                found.append((self.finer, parts))
            if not found:
                continue
            times = [float(evaluate(chain, [layout])[0][0]) for chain, layout in found]
            k = next(k for k, time in enumerate(times) if time <= min(times) * (1 + SAME))
            chain, layout = found[k]
            what = _described(chain, layout) if layout is simple else _PARTS if chain is self.finer else "planned"
            name = f"{what}, up to {format_bytes(limit)} of buffers"
            yield self._row(name, chain.wrapping(layout, name), units=chain.units)

    def _limits(self) -> list[float]:
        usual = self.traced or self.chain.wrapping(by_unit(self.chain), BY_BLOCK)
        one = msgspec.structs.replace(usual, micro_batches=1, sync="each")
        nbytes = run(self.units, one, self.costs, self.precision).peak_nbytes
        limits = [nbytes * multiple for multiple in _MULTIPLES]
        if self.memory_bytes is not None:
            most = self.memory_bytes - self._states(self.costs.ranks)
            limits = [limit for limit in limits if limit < most]
            limits += [float(most)] * (most > 0)
        return limits

    def _parts(self, limits: Sequence[float]) -> list[Layout | None]:
        """Return, for each limit, the fastest groups if blocks may be divided, or None if there are too many parts."""
        if not len(self.units) < len(self.parts) <= _MOST_PARTS:
            return [None] * len(limits)
        self.finer = Chain(self.parts, self.costs, self.precision, self.chain.node)
        return fastest(self.finer, limits)

    def _row(
        self,
        name: str,
        wrapping: Wrapping,
        *,
        sync: Sync = "each",
        units: Sequence[Unit] | None = None,
        costs: Costs | None = None,
    ) -> Row:
        wrapping = msgspec.structs.replace(
            wrapping, micro_batches=self.micro_batches, sync=sync, workload_id=self.workload_id
        )
        costs, units = costs or self.costs, units or self.units
        step: Step = run(units, wrapping, costs, self.precision)
        self.steps[name] = step.timeline(units, wrapping)
        bound_s = None
        if wrapping.replicas == wrapping.micro_batches == 1:
            bound_s = lower_bound(units, costs, step.peak_nbytes, node=self.chain.node).seconds
            bound_s += self.optimizer_s / costs.ranks
        kept = sum(unit.gathered for unit in units if unit.path in _kept(wrapping))
        seconds = step.seconds + self.optimizer_s / costs.ranks
        return Row(name, seconds, step.peak_nbytes, self._states(costs.ranks), kept, bound_s, wrapping)

    def _states(self, ranks: int) -> int:
        """Return 0, because the size of the parameters and the optimizer's states is unknown."""
        return 0


class _OfWorkload(_Table):
    """The rows for a workload on a cluster, including HSDP and DDP."""

    def __init__(self, workload: Workload, cluster: Cluster, sharding: Sharding) -> None:
        self.workload, self.cluster, self.sharding = workload, cluster, sharding
        self.precision = sharding.precision or Precision(4, workload.itemsize, 4)
        self.costs, gpus = sharding.costs(cluster), sharding.gpus(cluster.workers)
        node = gpus if 1 < gpus < self.costs.ranks else None
        optimizer_s = math.fsum(workload.ops[op].duration_s for op in workload.phase_ops("optimizer"))
        super().__init__(self._units(), self.costs, self.precision, node, sharding.micro_batches, optimizer_s)
        self.parts = self._units(level=2)
        self.memory_bytes, self.workload_id = sharding.memory_bytes, identity(workload)
        self.elements = sum(unit.gathered for unit in self.units) // self.precision.gathered

    @property
    def compute_s(self) -> float:
        return self.workload.compute_s + self._more_s()

    def _units(self, level: int = 1) -> list[Unit]:
        units = units_of(self.workload, self.costs.ranks, self.precision, level=level)
        if not any(unit.trained for unit in units):
            raise InputError(f"{self.workload.name}: no module is trained (expected parameters with gradients)")
        return units

    def _rows(self) -> list[Row]:
        return [*super()._rows(), self._ddp(), *self._hybrid()]

    def _hybrid(self) -> Iterator[Row]:
        """Yield the rows of HSDP, in which each replica of the model is sharded over one host or a few hosts."""
        workers = self.cluster.workers
        gpus = self.sharding.gpus(workers)
        if not 2 <= gpus < workers:
            return
        for ranks in [ranks for ranks in range(gpus, workers, gpus) if workers % ranks == 0][:3]:
            replicas = workers // ranks
            name = f"{BY_BLOCK}, {replicas} replicas (HSDP)"
            wrapping = msgspec.structs.replace(self.chain.wrapping(by_unit(self.chain), name), replicas=replicas)
            costs, units = self.shared(replicas)
            sync: Sync = "all-reduce-last" if self.micro_batches > 1 else "each"
            yield self._row(name, wrapping, sync=sync, units=units, costs=costs)

    def shared(self, replicas: int) -> tuple[Costs, Sequence[Unit]]:
        """Return the costs, and the units (modules that run once), of a model with this number of replicas."""
        costs = self.costs if replicas == 1 else self.sharding.costs(self.cluster, replicas)
        return costs, self.units if replicas == 1 else units_of(self.workload, costs.ranks, self.precision)

    def _states(self, ranks: int) -> int:
        """Return the bytes of a rank's shards of the parameters and of the optimizer's states."""
        trained = sum(unit.gradients for unit in self.units) // self.precision.gathered
        return (self.elements * self.precision.stored + trained * _STATE * _STATES) // ranks

    def _more_s(self) -> float:
        """Return the seconds that a step takes longer because of the micro-batches after the first."""
        return (self.sharding.micro_batches - 1) * (self.workload.compute_s - self.optimizer_s)

    def _ddp(self) -> Row:
        """Return DDP's row: parameters are stored whole, and gradients are reduced in the same precision as FSDP2's."""
        # whole jobs count one latency for both halves
        gather, halves = self.costs.gather, 1 if self.sharding.machine is not None else 2
        both = LinearCost(halves * gather.alpha_s, 2 * gather.beta_s_per_byte)
        cluster = self.cluster
        if self.sharding.machine is not None or self.sharding.gpus_per_host > 1:
            cluster = Cluster(cluster.workers, {"ring": both})
        times, itemsize = self.precision.reduced, self.workload.itemsize
        workload = msgspec.structs.replace(
            self.workload,
            tensors=tuple(
                msgspec.structs.replace(tensor, nbytes=max(tensor.nbytes * times // itemsize, 1))
                for tensor in self.workload.tensors
            ),
        )
        seconds = iteration_time(workload, schedule("ddp", workload, cluster), cluster) + self._more_s()
        return Row("DDP", seconds, workload.nbytes, self._states(1), 0, None, None)


#: Ways to accumulate gradients over micro-batches; compared with reducing each time, they need more memory and send
#: less.
_ACCUMULATING: Sequence[tuple[str, Sync]] = (
    (f"{BY_BLOCK}, gradients reduced in the last micro-batch", "last"),
    ("everything kept, gathered once a step (ZeRO-1)", "gathered-once"),
)


def best(rows: Sequence[Row], memory_bytes: int | None) -> int:
    """Return the index of the first row that fits into the memory and is nearly as fast as the fastest such row.

    If the first row of the table fits, only a clearly faster row can replace it.

    Raises `InputError` if the memory is too small for every row.
    """
    fitting = [k for k, row in enumerate(rows) if memory_bytes is None or row.nbytes <= memory_bytes]
    if not fitting:
        least = min(rows, key=lambda row: row.nbytes)
        raise InputError(
            f"memory: {format_bytes(memory_bytes or 0)} (expected at least {format_bytes(least.nbytes)}, for "
            f"{least.name})"
        )
    fastest_s = min(rows[k].seconds for k in fitting)
    usual_s = rows[0].seconds / (1 + SAME) if 0 in fitting else math.inf
    most_s = [min(fastest_s * (1 + SAME), usual_s) if k else fastest_s * (1 + SAME) for k in fitting]
    return next(k for k, most in zip(fitting, most_s, strict=True) if rows[k].seconds <= most)


def _as_good(row: Row, other: Row) -> bool:
    """Return whether a row is at least as fast as another row (up to rounding), with at most the same memory."""
    return row.seconds <= other.seconds * (1 + _ROUNDING) and row.nbytes <= other.nbytes


def _kept(wrapping: Wrapping) -> set[str]:
    return {path for group in wrapping.groups if group.reshard is False for path in group.modules}


def _regular(chain: Chain) -> Iterator[Layout]:
    """Yield regular layouts: groups of equal numbers of blocks, with the same settings except in the last groups."""
    for count in _EVERY:
        for state in (RESHARD,) if chain.node is None else (RESHARD, NODE):
            for kept in _LAST_KEPT:
                for depth in (0, 2, 3):
                    yield every(chain, count, state, kept)._replace(forward=depth, backward=depth)


def _described(chain: Chain, layout: Layout) -> str:
    count = len(chain.starts[: chain.starts.index(layout.begins[1])]) if len(layout.begins) > 1 else len(chain.starts)
    size = "a block" if count == 1 else f"{count} blocks"
    node = ", resharded to its host" if NODE in layout.states else ""
    kept = layout.states.count(KEEP)
    last = "" if kept < 2 else f", the last {kept} kept"
    ahead = f", {layout.forward} gathered ahead" if layout.forward else ""
    return f"{size} a group{node}{last}{ahead}"
