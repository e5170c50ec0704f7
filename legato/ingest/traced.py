"""The values that all importers fill in: ops, transfers and gradients of a traced step, and the result.

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

    Before it the device was idle: for `gap_s` because the host had launched no
    work, for `stalled_s` during a transfer that the op may have needed, and for
    `late_s` while such a transfer waited for a late rank.
    """

    name: str
    phase: Phase
    start_s: float
    end_s: float
    duration_s: float
    gap_s: float = 0.0
    stalled_s: float = 0.0
    late_s: float = 0.0
    deps: tuple[int, ...] | None = None  # None: it depends on the op before it


class Sent(NamedTuple):
    """A send to a peer, or a receive from it, and the `purpose` of its group."""

    kind: str
    peer: int
    nbytes: int
    purpose: str


@dataclass(frozen=True)
class TracedTransfer:
    """One collective as the trace has it; from `start_s` on it waited `waited_s` for late ranks.

    `nbytes` are the bytes that this rank contributes. `ranks` take part; `group` has the ranks of its process group,
    and `purpose` what the program calls this (empty if unknown); `peer` is the other rank of a send or receive, and
    `parts` are the collectives that one kernel carries out together. Collectives of one `stream` run one after another.
    """

    name: str
    kind: str
    nbytes: int | None
    start_s: float
    end_s: float
    phase: Phase
    carries_gradients: bool
    waited_s: float = 0.0
    after: int = -1  # the last op that began before it was issued
    ranks: int | None = None
    group: tuple[int, ...] = ()
    purpose: str = ""
    peer: int | None = None
    stream: int = 0
    parts: tuple[Sent, ...] = ()

    @property
    def began_s(self) -> float:
        """Return when its wait for late ranks ended."""
        return min(self.start_s + self.waited_s, self.end_s)


@dataclass(frozen=True)
class Gradient:
    """A gradient, which becomes a tensor of the workload.

    `ready_after` and `readers` are indices of ops, `transfer` is the number of
    the transfer that carried it.
    """

    name: str
    nbytes: int
    ready_after: int
    readers: tuple[int, ...] | None = None  # None: not in the trace
    transfer: int | None = None


@dataclass
class Notes:
    """Notes of what a trace lacks, and of what the importer assumes instead; each line once."""

    missing: list[str] = field(default_factory=list)
    assumed: list[str] = field(default_factory=list)

    def lacks(self, missing: str, assumed: str | None = None) -> None:
        """Note what the trace lacks, and what is assumed instead."""
        if missing not in self.missing:
            self.missing.append(missing)
        if assumed is not None:
            self.assume(assumed)

    def assume(self, assumed: str) -> None:
        """Note an assumption."""
        if assumed not in self.assumed:
            self.assumed.append(assumed)


@dataclass(frozen=True)
class KindTimes:
    """How long a step transfers with one kind of collective (seconds), and how long nothing is computed meanwhile.

    Collectives that run at the same time count once if they are of one kind, and for each kind if they are of several.
    All-gathers, which FSDP issues in both passes, are a kind for each `phase`.
    """

    kind: str
    communication_s: float
    exposed_s: float
    phase: Phase | None = None


@dataclass(frozen=True)
class RankMeasure:
    """The measurements of one rank's step (seconds).

    `computation_s` C is the time in which the device computes, and
    `communication_s` N the time in which the network transfers; `exposed_comm_s`
    is the part of N during which nothing is computed. `waiting_s` is the sum of
    the times for which collectives waited for late ranks (None with the trace of
    one rank alone), `exposed_waiting_s` the time in which nothing else happened.
    In the remaining time, `idle_s`, the device had nothing to do: it waited for
    its host. So C + exposed N + exposed waiting + idle = T. `undelayed_s` is T
    without the time by which late ranks delayed computation that had been
    launched. `overlap` (alpha), `rho` and `utilization` are defined as in TicTac
    and Caramel. `host_overlap` is alpha with the time in which the device waits
    for its host counted as computation, and waiting for late ranks not counted:
    the overlap that a plan can change. `kinds` divides N and exposed N by kinds of
    collectives; the kind `wait` is the time in which an operator still waits for
    a collective that the trace shows as ended.
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
    """The work of one call of `fully_shard` (FSDP2) in a step, with the bytes of all ranks; the root has no modules.

    `reshard` is what `reshard_after_forward` seems to be: False if it was not gathered in the backward pass. `ahead` is
    by how many groups it is gathered before its own hook, in the forward and in the backward pass. `gathers` and
    `scatters` count its collectives. `forward_s` has a time for each of its modules, in the order in which they ran,
    where these can be told apart. Of an embedding, no gradient of the input is needed.
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
    """The groups of FSDP2 in the order of the forward pass, and what they cost.

    Times are medians over the steps, of one micro-batch. `root_s` are the (forward, backward) times of what no group
    holds, before the first group and after each. The samples (bytes of all ranks, seconds) are all-gathers over
    `ranks`, over fewer of them, and reduce-scatters. `odd` is what the rules of FSDP2 do not cover, or "".
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
    """The program of all ranks, with notes of its own; None if the traces lack what one needs: `lacking` says what."""

    program: Program | None
    notes: Notes
    lacking: str = ""


@dataclass(frozen=True)
class Imported:
    """The result of an import; `timeline` is None for traces without times.

    `workload` is None if the trace lacks what a plan needs; `lacking` says what. The workload describes `rank`;
    `others` are the workloads of the other steps that were read. `ranks` are the measurements of the step that the
    workload and the timeline show, `steps` the measurements of all steps that were read. `transfers` are the
    collectives of these steps on that rank. `workers` is the number of the job's workers, and `plan` what the step
    sent; both are None if the trace does not tell. Without `on_device` the host computes itself. `fsdp` tells that FSDP
    shards the job, and `sharded` has the groups of FSDP2. `whole` is what all ranks compute and send.
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
        """The number of workers that share gradients: their group's where the trace tells one, else the whole job's."""
        group = self.gradients_group
        return len(group) if group else self.workers

    @property
    def gradients_group(self) -> tuple[int, ...]:
        """The ranks among which all gradients are reduced; empty if the trace does not tell, or there are several."""
        groups = {transfer.group for transfer in self.transfers if transfer.carries_gradients}
        return next(iter(groups)) if len(groups) == 1 else ()
