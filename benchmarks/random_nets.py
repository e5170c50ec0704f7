"""Random layered networks: workloads for which no scheduler was tuned."""

from __future__ import annotations

import random

from legato.core.workload import Op, Tensor, Workload

__all__ = ["layered_net"]

COMPUTE_S, NBYTES = 0.2, 100 * 10**6


def layered_net(seed: int) -> Workload:
    """4 to 128 layers of 1 to 4 nodes each, 0.2 s of computation and 100 MB of gradients.

    Each node reads one to three earlier ones, and has up to three tensors. Times and sizes
    are lognormal; tensors grow or shrink towards the output. Updates take up to 30% of the
    time of the forward and backward pass.
    """
    rng = random.Random(seed)
    layers = int(2 ** rng.uniform(2, 7))
    branching, growth = rng.choice([0.0, 0.2, 0.6]), rng.uniform(-3, 3)
    updates = rng.choice([0.0, 0.02, 0.1, 0.3])
    reads: list[set[int]] = []
    depth: list[float] = []
    last: list[int] = []
    for layer in range(layers):
        nodes = []
        for _ in range(rng.randint(2, 4) if rng.random() < branching else 1):
            before = set(rng.sample(last, rng.randint(1, min(3, len(last))))) if last else set()
            if reads and rng.random() < branching / 2:
                before.add(rng.randrange(len(reads)))
            nodes.append(len(reads))
            reads.append(before)
            depth.append(layer / layers)
        last = nodes
    nodes = len(reads)
    time = [rng.lognormvariate(0, 1) for _ in range(nodes)]
    sizes = [
        [rng.lognormvariate(growth * depth[i], 2) for _ in range(rng.choice([0, 1, 1, 2, 3]) if i else 1)]
        for i in range(nodes)
    ]
    scale = COMPUTE_S / (3 * sum(time))
    total = sum(map(sum, sizes))
    readers: list[list[int]] = [[] for _ in range(nodes)]
    for i, before in enumerate(reads):
        for j in before:
            readers[j].append(i)
    ops = [Op(f"forward {i}", "forward", scale * time[i], tuple(sorted(reads[i]))) for i in range(nodes)]
    backward = {i: nodes + k for k, i in enumerate(reversed(range(nodes)))}
    for i in reversed(range(nodes)):
        deps = sorted({i, *(backward[j] for j in readers[i])})
        ops.append(Op(f"backward {i}", "backward", 2 * scale * time[i], tuple(deps)))
    tensors = []
    for i in range(nodes):
        for k, size in enumerate(sizes[i]):
            nbytes = max(16, int(NBYTES * size / total) // 16 * 16)
            readers_of = [i]
            if updates:
                readers_of.append(len(ops))
                ops.append(Op(f"update {i}.{k}", "optimizer", updates * COMPUTE_S * nbytes / NBYTES))
            tensors.append(Tensor(f"{i}.{k}", nbytes, backward[i], tuple(readers_of)))
    return Workload(f"random {seed}", tuple(ops), tuple(tensors))
