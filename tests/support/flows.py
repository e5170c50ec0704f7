"""One network and jobs on it, how long fabrics take in closed form, and fair rates by linear programs."""

import math

import numpy as np
from scipy.optimize import linprog

from legato.core.workload import Op, Tensor, Workload
from legato.simulator.flow import Network

ALPHA, BYTES = 1e-3, 4_000_000
BETA = 8 / 1e9  # seconds a byte
M = BETA * BYTES
FORWARD, BACKWARD = 0.25, 0.5
COMPUTE = FORWARD + BACKWARD


def job(sizes=(BYTES,), forward=FORWARD, backward=BACKWARD):
    """A layer a tensor, of the same length each; gradients appear last layer first."""
    layers = len(sizes)
    ops = [Op(f"f{i}", "forward", forward / layers, (i - 1,) if i else ()) for i in range(layers)]
    ops += [Op(f"b{i}", "backward", backward / layers, (layers + i - 1,)) for i in range(layers)]
    tensors = [Tensor(f"w{layers - 1 - i}", n, layers + i, (layers - 1 - i,)) for i, n in enumerate(sizes)]
    return Workload("job", tuple(ops), tuple(tensors))


MANY = job((300, 5000, 70, 4096, 11, 900), forward=3e-5, backward=7e-5)


def network(workers, send_s=0.0, **options):
    return Network(workers=workers, bandwidth_bps=1e9, latency_s=ALPHA, send_s=send_s, **options)


def hosts_of(gpus, name="hierarchical"):
    """Options of a network: hosts with this number of GPUs on one network card, for the hierarchical fabric."""
    return {"gpus_per_host": gpus, "gpus_per_card": gpus} if name == "hierarchical" else {}


CLOSED_FORMS = {
    "ring": lambda n: COMPUTE + 2 * (n - 1) * (ALPHA + M / n),
    "ring-whole": lambda n: COMPUTE + 2 * (n - 1) * (ALPHA + M),
    "ring+multicast": lambda n: COMPUTE + (n - 1) * (ALPHA + M / n) + ALPHA + (n - 1) * M / n,
    "halving-doubling": lambda n: COMPUTE + 2 * math.log2(n) * ALPHA + 2 * (n - 1) / n * M,
    "recursive-doubling": lambda n: COMPUTE + math.log2(n) * (ALPHA + M),
    "butterfly": lambda n: COMPUTE + math.log2(n) * (ALPHA + M),
    "tree": lambda n: COMPUTE + 2 * math.log2(n) * (ALPHA + M),
    "shuffle": lambda n: COMPUTE + 2 * (ALPHA + (n - 1) / n * M),
    # Distribution to one worker after another staggers them so that their gradients do not meet either.
    "parameter-server": lambda n: COMPUTE + 2 * ALPHA + (n + 1) * M,
    "multicast": lambda n: COMPUTE + 2 * ALPHA + (n + 1) * M,
    # The sum waits for the last worker; store and forward costs another M.
    "aggregation": lambda n: COMPUTE + 2 * ALPHA + (n + 2) * M,
    "multicast+aggregation": lambda n: COMPUTE + 2 * ALPHA + 3 * M,
}


def gradient_s(found):
    """When each worker has each gradient, of a result: by [iteration, worker, tensor]."""
    ready = [found.compute.backward.at[tensor.ready_after] for tensor in found.workload.tensors]
    return np.array([found.compute.op_times("backward", k)[1][:, ready] for k in range(found.iterations)])


def staggering_s(found):
    """From the first to the last worker's start of the last backward pass, of a result."""
    starts, _ = found.compute.op_times("backward", found.iterations - 1)
    return starts[:, 0].max() - starts[:, 0].min()


def max_min_by_linear_programs(routes, capacity):
    """Raise the smallest rates as far as they go, fix those that cannot go further, repeat.

    A route that has a link several times takes its rate as often there.
    """
    fixed = {}
    while len(fixed) < len(routes):
        free = [f for f in range(len(routes)) if f not in fixed]
        # Variables: all rates, and t, the smallest free one.
        rows = [[float(list(route).count(k)) for route in routes] + [0.0] for k in range(len(capacity))]
        rows += [[-float(f == g) for g in range(len(routes))] + [1.0] for f in free]
        limits = [*capacity, *[0.0] * len(free)]
        bounds = [(fixed.get(f, 0), fixed.get(f)) for f in range(len(routes))] + [(0, None)]
        level = -linprog([0.0] * len(routes) + [-1.0], rows, limits, bounds=bounds).fun
        for f in free:
            low = [(fixed.get(g, level), fixed.get(g)) for g in range(len(routes))] + [(0, None)]
            goal = [-float(f == g) for g in range(len(routes))] + [0.0]
            if -linprog(goal, rows, limits, bounds=low).fun < level * (1 + 1e-7):
                fixed[f] = level
    return [fixed[f] for f in range(len(routes))]
