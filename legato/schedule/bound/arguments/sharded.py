"""What holds where workers update their shards only: "update" and "step". docs/bounds.md has the proofs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from legato.core.errors import InputError
from legato.schedule.bound.arguments.ends import counts, finish
from legato.schedule.bound.problem import Argument, Problem, Proved
from legato.simulator.period import Period

__all__ = ["Step", "Update", "first_gather"]


def first_gather(problem: Problem, tensors: Iterable[int]) -> float:
    """When any of these tensors can be gathered: after the backward pass, and after its update if all follow it."""
    backward, ops, updates = problem.duration("backward"), problem.every.ops, Period.of(problem.every).updates
    if not problem.kind.step_last:
        return backward
    return backward + min(sum(ops[op].duration_s for op in updates[t]) for t in tensors)


class Update(Argument, frozen=True, tag="update"):
    """An optimizer op stands between all reduce-scatters and all all-gathers of the tensors that it reads."""

    op: int

    @classmethod
    def find(cls, problem: Problem, found: Sequence[Proved], beat: float) -> Iterator[Proved]:
        """What each op proves, but for those that cannot prove more than `beat`."""
        for op in problem.every.phase_ops("optimizer") if problem.sharded else ():
            if not (tensors := Period.of(problem.every).reads[op]):
                continue
            alone = 2 * (problem.half + sum(problem.half_work(tensors))) + problem.every.ops[op].duration_s
            latest = sum(max(times[t] for t in tensors) for times in (problem.release, problem.tail))
            if alone + latest > beat:  # all of them in one message take as long
                yield cls(op).proved(problem)

    def proves(self, problem: Problem) -> float:
        """f(release times) + d + f(tails), with f for halves."""
        if not problem.sharded:
            raise InputError("certificate: case 'update' without a shard")
        tensors = Period.of(problem.every).reads[self.op] if self.op in problem.every.phase_ops("optimizer") else []
        if not tensors:
            raise InputError(f"certificate: op {self.op} (expected an optimizer op that reads a tensor)")
        work, ends = problem.half_work(tensors), (problem.release, problem.tail)
        return problem.every.ops[self.op].duration_s + sum(finish(near, tensors, work, problem.half) for near in ends)


class Step(Argument, frozen=True, tag="step"):
    """Parameters are gathered after the backward pass, or after the step."""

    tensors: tuple[int, ...]

    @classmethod
    def find(cls, problem: Problem, found: Sequence[Proved], beat: float) -> Iterator[Proved]:
        """What sets of the tensors with the longest tails prove."""
        if problem.sharded and problem.compute == "one":
            by_tail = sorted(range(len(problem.tail)), key=problem.tail.__getitem__, reverse=True)
            for count in counts(len(by_tail)):
                yield cls(tuple(sorted(by_tail[:count]))).proved(problem)

    def proves(self, problem: Problem) -> float:
        """b + d + f(tails), or max(b, f(release times)) + alpha/2 + beta/2 * B + min q, with f for halves."""
        if not problem.sharded or problem.compute != "one":
            raise InputError("certificate: case 'step' (expected a shard, and one stream)")
        problem.check_tensors(self.tensors)
        work, ends = problem.half_work(self.tensors), (problem.release, problem.tail)
        scattered, gathered = (finish(near, self.tensors, work, problem.half) for near in ends)
        busy = max(problem.duration("backward"), scattered) + problem.half + sum(work)
        last = min(problem.tail[t] for t in self.tensors)
        return max(first_gather(problem, self.tensors) + gathered, busy + last)
