"""Random workloads, clusters and plans for property tests.

Times and sizes are small multiples of powers of two, so that sums of them are
exact floats and tests can say `==` and `>=` and mean it.
"""

import random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from msgspec.structs import replace

from legato.core.cluster import Cluster, Contention, LinearCost
from legato.core.plan import Message, Plan, Slice
from legato.core.workload import Op, Tensor, Workload

#: How many examples a property is tried on under each profile, unless it says otherwise.
QUICK, USUAL, THOROUGH = 8, 20, 500


def examples(count, **options):
    """Try a property on `count` examples, times 0.16, 0.4 or 10 under the profile "quick", "usual" or "thorough"."""
    return settings(max_examples=max(5, 10 * count * settings.default.max_examples // THOROUGH), **options)


def seeds(count, quick=None):
    """`range(count)` for a test's parameter `seed`; all but the first `quick` are slow (None: all but a fifth)."""
    return some(range(count), range(-(-count // 5) if quick is None else quick))


def some(values, quick):
    """`values` for a test's parameter; all but those in `quick` are slow."""
    return [value if value in quick else pytest.param(value, marks=pytest.mark.slow) for value in values]


#: Seconds, in eighths; zero among them.
durations = st.integers(0, 40).map(lambda n: n / 8)
costs = st.builds(
    LinearCost,
    st.integers(0, 24).map(lambda n: n / 4),
    st.integers(0, 8).map(lambda n: n / 4),
)
#: Interpolated between measured sizes, mostly.
measured = st.dictionaries(st.integers(1, 48), st.integers(1, 48).map(lambda n: n / 4), min_size=2, max_size=6).map(
    lambda times: LinearCost.following(times.items())
)


@st.composite
def workloads(draw, max_ops=5, max_tensors=5, optimizer=True, compiled=False):
    """Branching dependencies; tensors that share an op, are tied (several readers), or that nothing reads.

    `optimizer=False` leaves optimizer ops out; `compiled` ones are the nodes of two graphs.
    """
    phases = ["forward"] * draw(st.integers(1, max_ops)) + ["backward"] * draw(st.integers(1, max_ops))
    phases += ["optimizer"] * (draw(st.integers(0, max_ops)) if optimizer else 0)
    ops = tuple(
        Op(
            f"graph 0/{phase}/n{i}" if compiled and phase != "optimizer" else f"{phase[0]}{i}",
            phase,
            draw(durations),
            tuple(sorted(draw(_some(range(i))))),
        )
        for i, phase in enumerate(phases)
    )
    backward = [i for i, phase in enumerate(phases) if phase == "backward"]
    readers = [i for i, phase in enumerate(phases) if phase != "backward"]
    tensors = tuple(
        Tensor(f"t{k}", draw(st.integers(1, 16)), draw(st.sampled_from(backward)), tuple(sorted(draw(_some(readers)))))
        for k in range(draw(st.integers(1, max_tensors)))
    )
    return Workload("random", ops, tensors)


def _some(values):
    return st.sets(st.sampled_from(list(values)), max_size=3) if values else st.just(set())


#: What messages and computation take from each other.
contentions = st.builds(Contention, costs, costs, st.sampled_from([0.0, 0.0, 0.25]))


@st.composite
def clusters(draw, max_collectives=3, contended=False, linear=False):
    """One to `max_collectives` costs called c0, c1, ..., all lines if `linear`; with `contended`, some contend."""
    count = draw(st.integers(1, max_collectives))
    contention = draw(st.none() | contentions) if contended else None
    return Cluster(
        draw(st.integers(1, 64)),
        {f"c{k}": draw(costs if linear else costs | measured) for k in range(count)},
        contention=contention,
    )


@st.composite
def plans(draw, workload, cluster, halves=True, op_order=None):
    """Any cut, merge, order and collective of the messages of a workload, with forward overlap or without.

    With `halves`, all-reduces and their two halves (in either form) are mixed.
    `op_order` is a strategy for orders of ops; None leaves the order to the workload.
    """
    kinds = ["all_reduce", "reduce_scatter", "push"] if halves else ["all_reduce"]
    first, second = [], []
    for tensor in workload.tensors:
        cuts = sorted(draw(st.sets(st.integers(1, max(1, tensor.nbytes - 1)), max_size=2)) - {tensor.nbytes})
        for start, stop in zip([0, *cuts], [*cuts, tensor.nbytes], strict=True):
            kind = draw(st.sampled_from(kinds))
            first.append((kind, Slice(tensor.name, start, stop)))
            if kind != "all_reduce":
                second.append(({"reduce_scatter": "all_gather", "push": "pull"}[kind], first[-1][1]))
    # The second halves stand after all the first ones, or as early as they may.
    messages = draw(_merged(first, cluster)) + draw(_merged(second, cluster))
    if draw(st.booleans()):
        messages = _pulled_forward(messages)
    return Plan("random", tuple(messages), draw(st.booleans()), draw(op_order) if op_order is not None else ())


@st.composite
def sharded_plans(draw, workload, cluster, op_order=None):
    """Any cut, merge, order and collective of the halves of a plan that shards the optimizer or the gradients."""
    messages = draw(_in_pairs(workload, cluster, ["reduce_scatter"]))
    order = draw(op_order) if op_order is not None else ()
    shard = draw(st.sampled_from(["optimizer", "gradients"]))
    return Plan("random", tuple(messages), draw(st.booleans()), order, shard=shard)


@st.composite
def paired_plans(draw, workload, cluster, op_order=None):
    """The same of all-reduces, and of their halves in pairs with the same slices."""
    messages = draw(_in_pairs(workload, cluster, ["all_reduce", "reduce_scatter"]))
    return Plan("random", tuple(messages), draw(st.booleans()), draw(op_order) if op_order is not None else ())


@st.composite
def _in_pairs(draw, workload, cluster, kinds):
    pieces = []
    for tensor in workload.tensors:
        cuts = sorted(draw(st.sets(st.integers(1, max(1, tensor.nbytes - 1)), max_size=1)) - {tensor.nbytes})
        spans = zip([0, *cuts], [*cuts, tensor.nbytes], strict=True)
        pieces += [(draw(st.sampled_from(kinds)), Slice(tensor.name, *span)) for span in spans]
    first = draw(_merged(pieces, cluster))
    scattered = [message for message in first if message.kind == "reduce_scatter"]
    gathered = [replace(message, kind="all_gather") for message in draw(st.permutations(scattered))]
    return _pulled_forward([*first, *gathered]) if draw(st.booleans()) else [*first, *gathered]


@st.composite
def _merged(draw, pieces, cluster):
    pieces = draw(st.permutations(pieces))
    messages = []
    for kind, piece in pieces:
        if messages and messages[-1][0] == kind and draw(st.booleans()):
            messages[-1][1].append(piece)
        else:
            messages.append((kind, [piece]))
    names = st.none() | st.sampled_from(list(cluster.collectives))
    return [Message(tuple(group), kind, draw(names)) for kind, group in messages]


def _pulled_forward(messages):
    """Each second half as early as the first halves of its tensors allow."""
    result = []
    for message in messages:
        at = 0
        if message.kind in ("all_gather", "pull"):
            tensors = {piece.tensor for piece in message.slices}
            at = 1 + max(
                k
                for k, other in enumerate(result)
                if other.kind in ("reduce_scatter", "push") and tensors & {piece.tensor for piece in other.slices}
            )
            result.insert(at, message)
        else:
            result.append(message)
    return result


@st.composite
def op_orders(draw, workload, captured=False):
    """Any order of the ops that `check_plan` accepts; with `captured`, backward and forward ops keep theirs."""
    needs = {i: set() for i in range(len(workload.ops))}
    phase = [op.phase for op in workload.ops]
    for i, op in enumerate(workload.ops):
        needs[i] |= {d for d in op.deps if op.phase == "forward" or phase[d] != "forward"}
    for tensor in workload.tensors:
        updates = {r for r in tensor.readers if phase[r] == "optimizer"}
        for r in tensor.readers:
            needs[r] |= {tensor.ready_after} | (updates if phase[r] == "forward" else set())
    if captured:
        fixed = workload.phase_ops("backward") + workload.phase_ops("forward")
        for k in range(1, len(fixed)):
            needs[fixed[k]].add(fixed[k - 1])
    order = []
    while len(order) < len(needs):
        possible = [i for i in needs if i not in order and needs[i] <= set(order)]
        order.append(draw(st.sampled_from(possible)))
    return tuple(order)


def shuffled(workload, seed):
    """A random order of the backward pass that dependencies allow."""
    rng, ops = random.Random(seed), workload.ops
    left, done = set(workload.phase_ops("backward")), []
    while left:
        done.append(rng.choice([i for i in sorted(left) if not left & set(ops[i].deps)]))
        left.remove(done[-1])
    return (*done, *(i for i in workload.iteration_order() if ops[i].phase != "backward"))
