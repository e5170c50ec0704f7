"""How sure a prediction is, judged by the errors of predictions for measured steps of the same kind.

`LIKE` sums up published steps by kind, whose rows do not come with the package; `python benchmarks/whole_jobs.py --open
FILE` prints it. The spread of a source covers four of five of its steps. A kind has the largest spread of its sources,
and with fewer than three sources at least the spread of all steps whose parameters are sharded, or not, like theirs.
docs/whole_jobs.md says how often such intervals hold for a source that had no part in them.
"""

from __future__ import annotations

from typing import NamedTuple

from legato.core.job import Job, Machine
from legato.zoo.presets import MACHINES

__all__ = ["APART", "LIKE", "SMALL_S", "Interval", "Kind", "Like", "interval", "is_default", "kind_of"]

#: Sequences of this number of tokens or more are long; layers that compute for less in both passes may be bound by the
#: host.
_LONG, SMALL_S = 16_384, 10e-3
#: If two predictions differ by less than `APART`, they do not show which layout is faster. `ORDER_NEAR` is the share of
#: such measured pairs (of one source, framework, model and number of GPUs) in the right order; `ORDER_APART` is the
#: same share of all other pairs.
APART = 0.05
ORDER_NEAR, ORDER_APART = 0.67, 0.94


class Kind(NamedTuple):
    """A kind of steps: what similar steps have in common.

    Whether parameters are sharded, layers have experts, sequences are long, and layers so small that the host may bound
    them.
    """

    sharded: bool
    mixture: bool
    long: bool
    small: bool

    def __str__(self) -> str:
        return (
            f"{'sharded' if self.sharded else 'unsharded'} parameters, {'a mixture' if self.mixture else 'dense'}, "
            f"{'from' if self.long else 'below'} {_LONG:,} tokens, layers {'below' if self.small else 'above'} 10 ms"
        )


class Like(NamedTuple):
    """How many measured steps there are of a kind, of how many sources, and their spread x.

    Four of five took 1 / (1 + x) to 1 + x times the prediction: with an efficiency that another step of theirs has
    (`fitted`), or with the preset's (`preset`).
    """

    steps: int
    sources: int
    fitted: float
    preset: float | None = None


LIKE: dict[Kind, Like] = {
    Kind(False, False, False, False): Like(275, 10, 0.15, 0.20),
    Kind(False, False, False, True): Like(19, 4, 0.17, 0.28),
    Kind(False, False, True, False): Like(8, 2, 0.15),
    Kind(False, True, False, False): Like(11, 2, 0.15),
    Kind(True, False, False, False): Like(46, 2, 0.20, 0.20),
    Kind(True, False, True, False): Like(19, 1, 0.18, 0.18),
}


class Interval(NamedTuple):
    """The seconds between which a step lies in four of five cases, and the measured steps it is based on."""

    low_s: float
    high_s: float
    spread: float
    like: Like


def kind_of(job: Job, layer_s: float) -> Kind:
    """Return the kind of a job's step; its smallest layer computes for `layer_s` seconds."""
    return Kind(job.shard == "parameters", job.model.experts > 1, job.model.sequence >= _LONG, layer_s < SMALL_S)


def is_default(machine: Machine) -> bool:
    """Return whether the efficiency comes from a preset, perhaps fitted to steps of another framework."""
    return machine.name in MACHINES and machine.efficiency == MACHINES[machine.name].efficiency


def interval(kind: Kind, machine: Machine, seconds: float) -> Interval | None:
    """Return the interval around these predicted seconds, or None if no measured step is of this kind."""
    like = LIKE.get(kind)
    spread = None if like is None else like.preset if is_default(machine) else like.fitted
    if like is None or spread is None:
        return None
    return Interval(seconds / (1 + spread), seconds * (1 + spread), spread, like)
