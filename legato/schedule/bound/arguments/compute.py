"""The bound "compute": computation, and the work of messages where one processor does both."""

from __future__ import annotations

from collections.abc import Iterator

from legato.schedule.bound.problem import Argument, Problem, Proved, cheapest_line
from legato.simulator.collective import LEAST_PACE

__all__ = ["Computation"]


class Computation(Argument, frozen=True, tag="compute"):
    """A worker computes this long; under contention, it also packs, and does each message's work or waits for it.

    docs/bounds.md has the proof for contention ("Processor").
    """

    @classmethod
    def find(cls, problem: Problem, beat: float) -> Iterator[Proved]:
        """Return the only candidate: nothing has to be chosen."""
        yield cls().proved(problem)

    def proves(self, problem: Problem) -> float:
        """C, or the longest path with unlimited streams; under contention on one stream, also the least of messages."""
        contention, number, nbytes = problem.cluster.contention, problem.number, problem.every.nbytes
        if contention is None or problem.compute != "one":
            return problem.computation()
        line, taken = cheapest_line(problem.cluster, nbytes, number), 1 - number(LEAST_PACE)
        alpha = min(number(contention.overhead.alpha_s), taken * line.alpha_s)
        beta = min(number(contention.overhead.beta_s_per_byte), taken * line.beta_s_per_byte)
        busy = alpha + (beta + number(contention.pack_s_per_byte)) * nbytes
        return problem.computation() + problem.whole(busy)
