"""The bound "compute": the time of computation, plus the work of messages if the same processor does this work."""

from __future__ import annotations

from collections.abc import Iterator

from legato.schedule.bound.problem import Argument, Problem, Proved, cheapest_line
from legato.simulator.collective import LEAST_PACE

__all__ = ["Computation"]


class Computation(Argument, frozen=True, tag="compute"):
    """A proof that an iteration takes at least as long as a worker computes.

    Under contention, the worker's processor also packs gradients, and spends time on each message. docs/bounds.md has
    the proof for contention ("Processor").
    """

    @classmethod
    def find(cls, problem: Problem, beat: float) -> Iterator[Proved]:
        """Yield the only certificate, because this argument needs no choice of tensors."""
        yield cls().proved(problem)

    def proves(self, problem: Problem) -> float:
        """Return the time of all computation, or of the longest path if there are unlimited streams.

        Under contention on one stream, the least work of the messages is added.
        """
        contention, number, nbytes = problem.cluster.contention, problem.number, problem.every.nbytes
        if contention is None or problem.compute != "one":
            return problem.computation()
        line, taken = cheapest_line(problem.cluster, nbytes, number), 1 - number(LEAST_PACE)
        alpha = min(number(contention.overhead.alpha_s), taken * line.alpha_s)
        beta = min(number(contention.overhead.beta_s_per_byte), taken * line.beta_s_per_byte)
        busy = alpha + (beta + number(contention.pack_s_per_byte)) * nbytes
        return problem.computation() + problem.whole(busy)
