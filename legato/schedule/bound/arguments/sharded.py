"""The bound "sharded", for workers that update only their shards: the proofs "Update" and "Step" of docs/bounds.md."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from legato.core.errors import InputError
from legato.schedule.bound.arguments.ends import counts, finish
from legato.schedule.bound.problem import Argument, Problem, Proved
from legato.simulator.period import Period

__all__ = ["Sharded", "first_gather"]


def first_gather(problem: Problem, tensors: Iterable[int]) -> float:
    """Return the earliest time at which an all-gather of any of these tensors can begin: the backward pass's end.

    With `step_last`, an all-gather also waits for its tensors' updates; then the time of the shortest update is added.
    """
    backward, ops, updates = problem.duration("backward"), problem.every.ops, Period.of(problem.every).updates
    if not problem.kind.step_last:
        return backward
    return backward + min(sum(ops[op].duration_s for op in updates[t]) for t in tensors)


class Sharded(Argument, frozen=True, tag="sharded"):
    """A proof from the order of events: reduce-scatters, then an update or the backward pass's end, then all-gathers.

    If `op` is given, it is the optimizer op that updates these tensors.
    """

    tensors: tuple[int, ...]
    op: int | None = None

    @classmethod
    def find(cls, problem: Problem, beat: float) -> Iterator[Proved]:
        """Yield proofs for optimizer ops whose bound may exceed `beat`, and for sets of the longest-tailed tensors."""
        if not problem.sharded:
            return
        for op in problem.every.phase_ops("optimizer"):
            if tensors := tuple(Period.of(problem.every).reads[op]):
                alone = 2 * (problem.half + sum(problem.half_work(tensors))) + problem.every.ops[op].duration_s
                latest = sum(max(times[t] for t in tensors) for times in (problem.release, problem.tail))
                if alone + latest > beat:  # the time if one message has them all
                    yield cls(tensors, op).proved(problem)
        if problem.compute == "one":
            by_tail = sorted(range(len(problem.tail)), key=problem.tail.__getitem__, reverse=True)
            for count in counts(len(by_tail)):
                yield cls(tuple(sorted(by_tail[:count]))).proved(problem)

    def proves(self, problem: Problem) -> float:
        """Return a lower bound; f is the earliest time at which all halves of these tensors can have been sent.

        For an op of d seconds, the bound is f(release times) + d + f(tails). Without an op, let b be the end of the
        backward pass, d the shortest update (0 unless updates come last), B the bytes, and q the tails. The bound is
        then the larger of b + d + f(tails) and max(b, f(release times)) + alpha/2 + beta/2 * B + min q.
        """
        if not problem.sharded or (self.op is None and problem.compute != "one"):
            raise InputError("certificate: case 'sharded' (expected a shard, and one stream or an op)")
        problem.check_tensors(self.tensors)
        work, ends = problem.half_work(self.tensors), (problem.release, problem.tail)
        scattered, gathered = (finish(near, self.tensors, work, problem.half) for near in ends)
        if self.op is not None:
            updates = problem.every.phase_ops("optimizer")
            if self.op not in updates or not set(self.tensors) <= set(Period.of(problem.every).reads[self.op]):
                raise InputError(f"certificate: op {self.op} (expected an optimizer op that reads the tensors)")
            return scattered + problem.every.ops[self.op].duration_s + gathered
        busy = max(problem.duration("backward"), scattered) + problem.half + sum(work)
        last = min(problem.tail[t] for t in self.tensors)
        return max(first_gather(problem, self.tensors) + gathered, busy + last)
