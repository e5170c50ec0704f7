"""Ask what twice the bandwidth would gain: a workload written by hand, planned on two networks, without PyTorch.

    python examples/two_networks.py

For each network it prints the bound and what every scheduler reaches.
"""

import legato
from legato.schedule.compare import best, compare

LAYERS = 20

# One iteration: a chain of layers, 2 ms forward and 4 ms backward each, 8 MiB of gradients each.
forward = [legato.Op(f"layer{i}", "forward", 2e-3, (i - 1,) if i else ()) for i in range(LAYERS)]
backward = [
    legato.Op(f"layer{LAYERS - 1 - k}", "backward", 4e-3, (LAYERS + k - 1, LAYERS - 1 - k)) for k in range(LAYERS)
]
tensors = [
    legato.Tensor(f"weight{LAYERS - 1 - k}", 8 * 2**20, ready_after=LAYERS + k, readers=(LAYERS - 1 - k,))
    for k in range(LAYERS)
]
job = legato.Workload("twenty layers", tuple(forward + backward), tuple(tensors), batch_size=32)

for gigabits in (10, 20):
    cluster = legato.Cluster.derive(workers=16, bandwidth_bps=gigabits * 1e9, latency_s=20e-6)
    found = compare(job, cluster)
    print(f"{gigabits} Gbit/s, at least {found[0].bound.seconds * 1e3:.0f} ms an iteration:")
    for candidate in found:
        print(f"  {candidate.plan.scheduler:14} {candidate.iteration_s * 1e3:6.1f} ms  {candidate.gap:+.0%}")
    print(f"  best: {best(found).plan.scheduler}")
