"""The values that all importers produce: ops, transfers and gradients of a traced step, and the result.

Times are in seconds since the first event of the trace.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from legato.core.plan import Plan
from legato.core.program import Program
from legato.core.timeline import Timeline
from legato.core.workload import Phase, Workload

__all__ = [
    "Gradient",
    "Imported",
    "KindTimes",
    "Notes",
    "RankMeasure",
    "Sent",
    "Sharded",
    "ShardedGroup",
    "TracedOp",
    "TracedTransfer",
    "Whole",
]


@dataclass(frozen=True)
class TracedOp:
    """One computation of a step.

    Before the op, the device was idle for three reasons: for `gap_s` because the host had launched no work, for
    `stalled_s` during a transfer that the op may have needed, and for `late_s` while this transfer waited for a late
    rank.
    """

    name: str
    phase: Phase
    start_s: float
    end_s: float
    duration_s: float
    gap_s: float = 0.0
    stalled_s: float = 0.0
    late_s: float = 0.0
    deps: tuple[int, ...] | None = None  # if None, the op depends only on the previous op


class Sent(NamedTuple):
    """A send to a peer or a receive from a peer; `purpose` is the program's name for the group of both."""

    kind: str
    peer: int
    nbytes: int
    purpose: str


@dataclass(frozen=True)
class TracedTransfer:
    """A traced collective. The collective begins at `start_s`, and first waits `waited_s` for late ranks.

    `nbytes` are the bytes that this rank contributes, and `ranks` is the number of ranks that take part. `group` has
    the ranks of the process group, and `purpose` is the program's name for the group (empty if unknown). `peer` is the
    other rank of a send or receive. `parts` are the sends and receives that one kernel runs together. Collectives of
    one `stream` run one after another.
    """

    name: str
    kind: str
    nbytes: int | None
    start_s: float
    end_s: float
    phase: Phase
    carries_gradients: bool
    waited_s: float = 0.0
    after: int = -1  # the last op that began before the transfer was issued
    ranks: int | None = None
    group: tuple[int, ...] = ()
    purpose: str = ""
    peer: int | None = None
    stream: int = 0
    parts: tuple[Sent, ...] = ()

    @property
    def began_s(self) -> float:
        """Return the time when the wait for late ranks ended."""
        return min(self.start_s + self.waited_s, self.end_s)


@dataclass(frozen=True)
class Gradient:
    """A traced gradient, which becomes a tensor of the workload.

    `ready_after` and `readers` are indices of ops, and `transfer` is the number of the transfer that carried the
    gradient.
    """

    name: str
    nbytes: int
    ready_after: int
    readers: tuple[int, ...] | None = None  # None if the trace does not tell
    transfer: int | None = None


@dataclass
class Notes:
    """Notes, without repetition, on what a trace lacks and what the importer assumes instead."""

    missing: list[str] = field(default_factory=list)
    assumed: list[str] = field(default_factory=list)

    def lacks(self, missing: str, assumed: str | None = None) -> None:
        """Record what the trace lacks, and what is assumed instead."""
        if missing not in self.missing:
            self.missing.append(missing)
        if assumed is not None:
            self.assume(assumed)

    def assume(self, assumed: str) -> None:
        """Record an assumption."""
        if assumed not in self.assumed:
            self.assumed.append(assumed)


@dataclass(frozen=True)
class KindTimes:
    """The seconds for which collectives of one kind run in a step, in total and while nothing is computed (exposed).

    Collectives of one kind that run at the same time count once; collectives of different kinds count for each kind.
    FSDP issues all-gathers in both passes, so all-gathers of different phases (`phase`) are different kinds.
    """

    kind: str
    communication_s: float
    exposed_s: float
    phase: Phase | None = None


@dataclass(frozen=True)
class RankMeasure:
    """The measurements of one rank's step (seconds).

    `computation_s` (C below) is the time in which the device computes, and `communication_s` (N) the time in which the
    network transfers; `exposed_comm_s` is the part of N during which nothing is computed. `waiting_s` is the total time
    for which collectives waited for late ranks, or None if only one rank was traced. `exposed_waiting_s` is the time in
    which collectives only waited, and nothing was computed or transferred. `idle_s` is the remaining time, in which the
    device waited for its host. The step takes T = C + exposed N + exposed waiting + idle. `undelayed_s` is T minus the
    delays of computation that was already launched but had to wait for late ranks. `overlap` (alpha), `rho` and
    `utilization` are defined as in TicTac and Caramel. `host_overlap` is the overlap that a plan can change: like
    alpha, but waits for late ranks are left out, and the device's waits for its host count as computation. `kinds`
    divides N and exposed N by kinds of collectives. The kind `wait` is the time for which an operator waits for a
    collective that has ended according to the trace.
    """

    rank: int
    step: str
    iteration_s: float
    computation_s: float
    communication_s: float
    waiting_s: float | None
    exposed_waiting_s: float
    idle_s: float
    undelayed_s: float
    exposed_comm_s: float
    rho: float
    overlap: float
    utilization: float
    host_overlap: float
    kinds: tuple[KindTimes, ...] = ()


@dataclass(frozen=True)
class ShardedGroup:
    """A group of FSDP2 in a step: one call of `fully_shard`. It counts the bytes of all ranks. The root has no modules.

    `reshard` is the apparent value of `reshard_after_forward`: False if the group was not gathered in the backward
    pass. `ahead` says how many groups before the group's own hook its gather is issued, in the forward and in the
    backward pass. `gathers` and `scatters` are the numbers of the group's collectives. `forward_s` has the time of each
    module in the order of their runs, if the trace separates modules. `input_needs_gradient` is False for an embedding.
    """

    modules: tuple[str, ...]
    gathered: int
    scattered: int
    reshard: bool | int
    ahead: tuple[int, int]
    gathers: int
    scatters: int
    forward_s: tuple[float, ...]
    backward_s: float
    input_needs_gradient: bool


@dataclass(frozen=True)
class Sharded:
    """The groups of FSDP2 in the order of the forward pass, with their costs.

    Times are for one micro-batch, as medians over the steps. `root_s` are the (forward, backward) times of computation
    outside all groups, before the first group and after each group. `gathers` (over all `ranks`), `gathers_in_host`
    (over fewer ranks) and `scatters` have measured (bytes of all ranks, seconds). `odd` names something in the trace
    that the rules of FSDP2 do not cover, or is "".
    """

    groups: tuple[ShardedGroup, ...]
    root: ShardedGroup
    root_s: tuple[tuple[float, float], ...]
    ranks: int
    gathered_itemsize: int
    reduced_itemsize: int
    gathers: tuple[tuple[int, float], ...]
    gathers_in_host: tuple[tuple[int, float], ...]
    scatters: tuple[tuple[int, float], ...]
    copy_s_per_byte: float
    micro_batches: int
    buffers: int
    update_s: float
    odd: str = ""


@dataclass(frozen=True)
class Whole:
    """The program of all ranks, with notes. If the traces lack something, `program` is None; `lacking` says what."""

    program: Program | None
    notes: Notes
    lacking: str = ""


@dataclass(frozen=True)
class Imported:
    """The result of an import; `timeline` is None for traces without times.

    If the trace lacks something that a plan needs, `workload` is None, and `lacking` says why. The workload describes
    `rank`; `others` are the workloads of the other steps that were read. `ranks` has each rank's measurements of the
    step that the workload and the timeline show, and `steps` has the measurements of all steps that were read.
    `transfers` are the collectives of all steps that were read, on `rank`. `workers` is the number of the job's
    workers, and `plan` has the messages that the step sent; both are None if the trace does not tell. If `on_device` is
    False, the ops run on the CPU. `fsdp` says whether FSDP shards the job, and `sharded` has the groups of FSDP2.
    `whole` is the program of all ranks.
    """

    workload: Workload | None
    timeline: Timeline | None
    ranks: tuple[RankMeasure, ...]
    notes: Notes
    lacking: str = ""
    steps: tuple[RankMeasure, ...] = ()
    transfers: tuple[TracedTransfer, ...] = ()
    workers: int | None = None
    plan: Plan | None = None
    rank: int = 0
    on_device: bool = True
    fsdp: bool = False
    sharded: Sharded | None = None
    whole: Whole | None = None
    others: tuple[Workload, ...] = ()

    @property
    def replicas(self) -> int | None:
        """Return the number of workers that share gradients: the size of their group if known, or of the whole job."""
        group = self.gradients_group
        return len(group) if group else self.workers

    @property
    def gradients_group(self) -> tuple[int, ...]:
        """Return the only group of ranks that reduces gradients; () if no group is known, or more than one."""
        groups = {transfer.group for transfer in self.transfers if transfer.carries_gradients}
        return next(iter(groups)) if len(groups) == 1 else ()
