"""What each part of Caramel gives, as in Figs. 11 and 12 of its paper, for its models on 8 and 16 workers.

    python benchmarks/ablation.py [bandwidth]

Compute utilization, first with the parts added one by one in the paper's order, starting from Horovod; then
the whole of it, with any one part switched off, on a network where adding up gradients takes time (or no depth is of
use). The setting, and what is fitted in it, is that of `legato/papers/caramel.py`: by default the bandwidth that the
paper's own first stage asks for.
"""

from __future__ import annotations

import sys

from legato.core.units import format_bandwidth, parse_bandwidth
from legato.papers.caramel import MODELS, SHUFFLE_BPS, STAGES, WORKERS, stages, without

PARTS = ("serialization", "batching", "scheduling", "depth")


def table(title: str, columns: list[str], rows: dict[str, list[float]]) -> None:
    """Shares as per cents; the column names above."""
    print(f"\n{title}\n{'':26}" + "".join(f"{name:>22}" for name in columns))
    for name, shares in rows.items():
        print(f"{name:26}" + "".join(f"{share:>22.1%}" for share in shares))


def main() -> None:
    bandwidth_bps = parse_bandwidth(sys.argv[1]) if len(sys.argv) > 1 else SHUFFLE_BPS
    places = {f"{model}, {n} workers": (model, n) for model in MODELS for n in WORKERS}
    added = {"published, Inception-v3, 8": list(STAGES.values())}
    added |= {name: stages(*place, bandwidth_bps) for name, place in places.items()}
    table(f"parts added one by one, shuffle at {format_bandwidth(bandwidth_bps)}", list(STAGES), added)
    off: list[tuple[str, ...]] = [(), *((part,) for part in PARTS), PARTS]
    names = ["all parts", *(f"no {part}" for part in PARTS), "none"]
    table(
        "one part switched off, with a cost of adding up",
        names,
        {name: [without(*place, bandwidth_bps, parts) for parts in off] for name, place in places.items()},
    )


if __name__ == "__main__":
    main()
