"""A time that no schedule can beat, and the certificate that proves it.

Each argument of docs/bounds.md gives a valid bound for every set of tensors. A few dozen promising sets are tried, so
the largest bound may be missed, but a bound never claims too much. Bounds are found with floats. `verify_bound`
evaluates the argument of a certificate again in whole numbers, which are rounded only in the safe direction.
"""

from __future__ import annotations

import html
import itertools
from fractions import Fraction
from typing import cast, get_args

import msgspec

from legato.core.cluster import Cluster
from legato.core.errors import InputError
from legato.core.plan import Shard
from legato.core.units import format_seconds
from legato.core.workload import Workload
from legato.schedule.basics.heads_tails import Order
from legato.schedule.bound.arguments.compute import Computation
from legato.schedule.bound.arguments.ends import Ends
from legato.schedule.bound.arguments.equal_pairs import EqualPairs
from legato.schedule.bound.arguments.nested import Nested
from legato.schedule.bound.arguments.sharded import Sharded
from legato.schedule.bound.arguments.two_sided import TwoSided
from legato.schedule.bound.plan_kind import PlanKind, Sends, check_sends, wider_kinds
from legato.schedule.bound.problem import ROUNDING, Argument, Problem, Proved, cheapest_line
from legato.simulator.period import Compute

__all__ = ["ARGUMENTS", "Bound", "Certificate", "cheapest_line", "lower_bound", "verify_bound"]

#: Up to the first number of tensors, bounds for all wider kinds of plans are thorough. Up to the second number, only
#: bounds for kinds that differ in `sends` are. Above the second number, wider kinds are skipped.
_FEW_TENSORS, _MOST_TENSORS = 64, 4096

#: A certificate says which argument gives the bound, and for which tensors.
Certificate = Computation | Ends | Nested | TwoSided | Sharded | EqualPairs

#: All arguments, in the order in which they are tried. Each one only has to look for larger bounds than earlier ones.
ARGUMENTS: tuple[type[Argument], ...] = get_args(Certificate)


class Bound(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A proof that no schedule takes less than `seconds` for one iteration.

    `kind` is None if the bound is proved for just the requested kind of plans. Otherwise, `kind` is the wider kind for
    which the bound is proved. With `at_floors`, every message is assumed to cost only as much as the smallest possible
    message.
    """

    seconds: float
    certificate: Certificate
    kind: PlanKind | None = None
    at_floors: bool = False

    def __str__(self) -> str:
        return f"no schedule takes less than {format_seconds(self.seconds)} (certificate: {self.certificate.case!r})"

    def _repr_html_(self) -> str:
        """Return the string representation as HTML for notebooks."""
        return f"<p>{html.escape(str(self))}</p>"


def lower_bound(
    workload: Workload,
    cluster: Cluster,
    *,
    compute: Compute = "one",
    order: Order = "captured",
    sends: Sends = "halves",
    shard: Shard = "none",
    step_last: bool = False,
    thorough: bool = True,
) -> Bound:
    """Return the largest bound that the arguments prove for the sets tried.

    The bound holds for every plan that `legato.simulator.collective` accepts with the same `compute` and `shard`, if
    `order` allows the plan's `op_order`. The bound is sharper if it has to hold for fewer plans: with
    `sends="all_reduces"`, only for plans of all-reduces; with `"pairs"`, also for plans with pairs of a reduce-scatter
    and an all-gather of the same slices, as in all sharded plans. With `shard` and `step_last`, the bound holds only
    for plans with all optimizer ops after the backward pass. For plans with messages in a wire format (`Message.wire`),
    pass `cluster.in_wire_format()`. Without `thorough`, or without numba, the argument "two-sided" is left out, because
    it takes longest; without `thorough`, "nested" also tries fewer sets. A bound for a wider kind of plans
    (`wider_kinds`) also holds for the requested kind. So a thorough bound is never below the bound of a wider kind,
    with up to 64 tensors, or up to 4,096 if the kinds differ only in `sends`. Raises `InputError` if a setting is
    unknown, and `TooLargeError` if there are too many ops.
    """
    check_sends(sends)
    own = PlanKind(order, sends, shard, step_last)
    best = _best(Problem(workload, cluster, compute, own, thorough=thorough))
    kinds = wider_kinds(own) if thorough and len(workload.tensors) <= _MOST_TENSORS else [own]
    for kind, at_floors in itertools.product(kinds, (False, True) if cluster.has_floors else (False,)):
        if (kind, at_floors) == (own, False):
            continue
        near = kind == own._replace(sends=kind.sends) or len(workload.tensors) <= _FEW_TENSORS
        costs = cluster.at_floors() if at_floors else cluster
        problem = Problem(workload, costs, compute, kind, thorough=thorough and near and not at_floors)
        if _best(problem, best.seconds).seconds > best.seconds:
            # Search again from the beginning, as a call for this kind does: another start gives a slightly different
            # bound.
            found = msgspec.structs.replace(_best(problem), kind=kind, at_floors=at_floors)
            best = max(best, found, key=lambda bound: bound.seconds)
    return best


def _best(problem: Problem, beat: float = 0.0) -> Bound:
    """Return the largest bound that an argument proves; the arguments only look for bounds above `beat`."""
    found: list[Proved] = []
    for argument in ARGUMENTS:
        found += argument.find(problem, max([beat, *(proved.seconds for proved in found)]))
    seconds, certificate = max(found, key=lambda proved: proved.seconds)
    return Bound(seconds, cast("Certificate", certificate))


def verify_bound(
    bound: Bound,
    workload: Workload,
    cluster: Cluster,
    *,
    compute: Compute = "one",
    order: Order = "captured",
    sends: Sends = "halves",
    shard: Shard = "none",
    step_last: bool = False,
) -> Fraction:
    """Return the seconds that the certificate proves in exact arithmetic; pass the same settings as to `lower_bound`.

    The result is rounded down to a whole number of ticks. Raises `InputError` if the bound is for another kind of
    plans, or if the certificate names tensors that the workload does not have. It also raises `InputError` if the bound
    exceeds what the certificate proves by over one part in 10**9 (the rounding of floats).
    """
    check_sends(sends)
    own = PlanKind(order, sends, shard, step_last)
    kind = own if bound.kind is None else bound.kind
    if kind not in wider_kinds(own):
        raise InputError(f"bound: for {kind} (expected one that has all of {own})")
    problem = Problem(workload, cluster.at_floors() if bound.at_floors else cluster, compute, kind, exact=True)
    proved = problem.part_s * int(bound.certificate.proves(problem))
    if Fraction(bound.seconds) > proved * (1 + Fraction(ROUNDING)):
        raise InputError(f"bound: {bound.seconds} s (its certificate proves only {float(proved)} s)")
    return proved
