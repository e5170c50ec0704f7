"""How sure a prediction is, judged by the errors of predictions for measured steps of the same kind.

`LIKE` summarizes published steps by kind. The measured steps are not in the package; `python benchmarks/whole_jobs.py
--open FILE` computes the summary. The spread of a source (a publication with measured steps) is so large that it covers
the prediction errors of four fifths of the source's steps. The spread of a kind is the largest spread of its sources.
If a kind has fewer than three sources, its spread is at least the spread of every source that shards (or does not
shard) parameters as the kind does. docs/whole_jobs.md says how often such intervals hold for steps of a new source.
"""

from __future__ import annotations

from typing import NamedTuple

from legato.core.job import Job, Machine
from legato.zoo.presets import MACHINES

__all__ = ["APART", "LIKE", "SMALL_S", "Interval", "Kind", "Like", "interval", "is_default", "kind_of"]

#: Sequences of at least `_LONG` tokens are long. Layers that compute for less than `SMALL_S` seconds in both passes
#: together are small: the host may limit their speed.
_LONG, SMALL_S = 16_384, 10e-3
#: If two predictions differ by less than `APART`, they do not show which layout is faster. `ORDER_NEAR` is the share of
#: such measured pairs (of one source, framework, model and number of GPUs) in the right order; `ORDER_APART` is the
#: same share of all other pairs.
APART = 0.05
ORDER_NEAR, ORDER_APART = 0.67, 0.94


class Kind(NamedTuple):
    """A kind of steps, which are similar in four respects.

    The fields say whether parameters are sharded, whether layers are mixtures of experts, whether sequences are long,
    and whether layers are so small that the host may limit their speed.
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
    """For one kind: the numbers of measured steps and of their sources, and the spreads of two sorts of predictions.

    A spread of x means that 80% of the steps took between 1 / (1 + x) and 1 + x times the predicted time. For `fitted`,
    the predictions use an efficiency fitted to another step of the same source; for `preset`, they use the preset's
    efficiency.
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
    """The seconds between which four of five steps lie, and the measured steps from which the interval follows."""

    low_s: float
    high_s: float
    spread: float
    like: Like


def kind_of(job: Job, layer_s: float) -> Kind:
    """Return the kind of a job's step; its smallest layer computes for `layer_s` seconds."""
    return Kind(job.shard == "parameters", job.model.experts > 1, job.model.sequence >= _LONG, layer_s < SMALL_S)


def is_default(machine: Machine) -> bool:
    """Return whether the efficiency is a preset's. (A preset may have been fitted to steps of another framework.)"""
    return machine.name in MACHINES and machine.efficiency == MACHINES[machine.name].efficiency


def interval(kind: Kind, machine: Machine, seconds: float) -> Interval | None:
    """Return the interval around these predicted seconds, or None if no measured step is of this kind."""
    like = LIKE.get(kind)
    spread = None if like is None else like.preset if is_default(machine) else like.fitted
    if like is None or spread is None:
        return None
    return Interval(seconds / (1 + spread), seconds * (1 + spread), spread, like)
