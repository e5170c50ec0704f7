"""A time that no schedule can beat, and the certificate that proves it.

Every set of tensors gives a valid bound, by each of the arguments of docs/bounds.md. A few dozen promising sets are
tried, so the bound may miss the best one, but it never claims too much. Bounds are found with floats. `verify_bound`
evaluates the argument of a certificate again in whole numbers, where nothing is rounded but in the safe direction.
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

#: With more tensors, wider kinds of plans are not looked at thoroughly but for what they send, or not at all.
_FEW_TENSORS, _MOST_TENSORS = 64, 4096

#: Certificates say which argument gives the bound, and for what.
Certificate = Computation | Ends | Nested | TwoSided | Sharded | EqualPairs

#: All arguments, in the order in which they are tried: the next ones need only look for what proves more.
ARGUMENTS: tuple[type[Argument], ...] = get_args(Certificate)


class Bound(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """No schedule takes less than `seconds` for one iteration.

    `kind` is a wider kind of plans for which this is proved, or None where it is the one asked for. With
    `at_floors`, every message counts as much as the smallest one.
    """

    seconds: float
    certificate: Certificate
    kind: PlanKind | None = None
    at_floors: bool = False

    def __str__(self) -> str:
        return f"no schedule takes less than {format_seconds(self.seconds)} (certificate: {self.certificate.case!r})"

    def _repr_html_(self) -> str:
        """The same for notebooks."""
        return f"<p>{html.escape(str(self))}</p>"


def lower_bound(  # noqa: PLR0913
    workload: Workload,
    cluster: Cluster,
    *,
    compute: Compute = "one",
    order: Order = "captured",
    sends: Sends = "halves",
    shard: Shard = "none",
    step_last: bool = False,
    wire: bool = False,
    thorough: bool = True,
) -> Bound:
    """The largest of the bounds above over the sets tried.

    It holds for every plan that `legato.simulator.collective` accepts under the same
    `compute` and `shard`, and with an `op_order` that `order` allows. It is sharper where it
    holds only for plans that send nothing but all-reduces (`sends="all_reduces"`), or these
    and reduce-scatters and all-gathers in pairs with the same slices (`"pairs"`), as all sharded
    plans do. With `shard`
    and `step_last`, it holds only for plans whose optimizer ops all follow the backward pass. It holds for
    plans with messages in a wire format (`Message.wire`) only with `wire`. Without
    `thorough`, or without numba, it leaves out "two-sided", which takes longest to find; if not `thorough`, "nested"
    tries fewer sets. What holds for a wider kind of plans (`wider_kinds`) holds for this one, too, so it is never
    less than for these, if it is thorough and there are at most 64 tensors, or 4,096 and the kinds differ in `sends`
    only. Raises `InputError` on an unknown setting, and `TooLargeError` on too many ops.
    """
    check_sends(sends)
    own = PlanKind(order, sends, shard, step_last, wire)
    best = _best(Problem(workload, cluster, compute, own, thorough=thorough))
    kinds = wider_kinds(own) if thorough and len(workload.tensors) <= _MOST_TENSORS else [own]
    for kind, at_floors in itertools.product(kinds, (False, True) if cluster.has_floors else (False,)):
        if (kind, at_floors) == (own, False):
            continue
        near = kind == own._replace(sends=kind.sends) or len(workload.tensors) <= _FEW_TENSORS
        near = near and kind.wire == wire and not at_floors
        costs = cluster.at_floors() if at_floors else cluster
        problem = Problem(workload, costs, compute, kind, thorough=thorough and near)
        if _best(problem, best.seconds).seconds > best.seconds:
            # Once more from the beginning, as for plans of this kind: from another start, the result differs slightly.
            found = msgspec.structs.replace(_best(problem), kind=kind, at_floors=at_floors)
            best = max(best, found, key=lambda bound: bound.seconds)
    return best


def _best(problem: Problem, beat: float = 0.0) -> Bound:
    """The most that an argument proves; if that is not above `beat`, any of them."""
    found: list[Proved] = []
    for argument in ARGUMENTS:
        found += argument.find(problem, max([beat, *(proved.seconds for proved in found)]))
    seconds, certificate = max(found, key=lambda proved: proved.seconds)
    return Bound(seconds, cast("Certificate", certificate))


def verify_bound(  # noqa: PLR0913
    bound: Bound,
    workload: Workload,
    cluster: Cluster,
    *,
    compute: Compute = "one",
    order: Order = "captured",
    sends: Sends = "halves",
    shard: Shard = "none",
    step_last: bool = False,
    wire: bool = False,
) -> Fraction:
    """The seconds that the certificate proves in exact arithmetic, under the settings given to `lower_bound`.

    They are whole parts of a second, rounded down. Raises `InputError` when this is less than the bound claims (by
    more than the rounding of its floats, a part in 10**9), or when the certificate names tensors that the workload
    does not have, or is for plans of another kind.
    """
    check_sends(sends)
    own = PlanKind(order, sends, shard, step_last, wire)
    kind = own if bound.kind is None else bound.kind
    if kind not in wider_kinds(own):
        raise InputError(f"bound: for {kind} (expected one that has all of {own})")
    problem = Problem(workload, cluster.at_floors() if bound.at_floors else cluster, compute, kind, exact=True)
    proved = problem.part_s * int(bound.certificate.proves(problem))
    if Fraction(bound.seconds) > proved * (1 + Fraction(ROUNDING)):
        raise InputError(f"bound: {bound.seconds} s (its certificate proves only {float(proved)} s)")
    return proved
