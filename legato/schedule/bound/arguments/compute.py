"""What computation alone takes, and with what messages take of the processor: "compute" and "processor"."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from legato.core.errors import InputError
from legato.schedule.bound.problem import Argument, Problem, Proved, cheapest_line
from legato.simulator.collective import LEAST_PACE

__all__ = ["Computation", "Processor"]


class Computation(Argument, frozen=True, tag="compute"):
    """Computation takes as long without any communication."""

    @classmethod
    def find(cls, problem: Problem, found: Sequence[Proved], beat: float) -> Iterator[Proved]:
        """Nothing has to be found."""
        yield cls().proved(problem)

    def proves(self, problem: Problem) -> float:
        """C, or the longest path with unlimited streams."""
        return problem.computation()


class Processor(Argument, frozen=True, tag="processor"):
    """The processor computes, packs, and does each message's work or waits for the message."""

    @classmethod
    def find(cls, problem: Problem, found: Sequence[Proved], beat: float) -> Iterator[Proved]:
        """Nothing has to be found."""
        if problem.cluster.contention is not None and problem.compute == "one":
            yield cls().proved(problem)

    def proves(self, problem: Problem) -> float:
        """Computation, and the least that messages with all bytes take."""
        contention, number, nbytes = problem.cluster.contention, problem.number, problem.every.nbytes
        if contention is None or problem.compute != "one":
            raise InputError("certificate: case 'processor' (expected contention, and one stream)")
        line, taken = cheapest_line(problem.cluster, nbytes, number), 1 - number(LEAST_PACE)
        alpha = min(number(contention.overhead.alpha_s), taken * line.alpha_s)
        beta = min(number(contention.overhead.beta_s_per_byte), taken * line.beta_s_per_byte)
        busy = alpha + (beta + number(contention.pack_s_per_byte)) * nbytes
        return problem.computation() + problem.whole(busy)
