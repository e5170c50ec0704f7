"""Cells that are slower than the same cell with less: a slower link, a longer latency, fewer servers.

Graham (Bounds on Multiprocessing Timing Anomalies, SIAM J. Appl. Math. 17, 1969) showed that
a fixed priority can take longer when ops get faster or machines are added. Where transfers
share links, a transfer that ends earlier can let another one in front of a third that is more
urgent, so the same holds for networks.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from msgspec.structs import replace

from legato.core.axes import SWEPT
from legato.reports.model import SweepRow

__all__ = ["mark_anomalies"]

#: Differences up to this fraction do not count: schedulers that search are no more exact.
_SAME = 1e-3


def mark_anomalies(rows: Sequence[SweepRow]) -> list[SweepRow]:
    """The rows, with `anomaly` where less of one axis is faster by more than 0.1%: the fastest such `AXIS=VALUE`."""
    best: dict[int, tuple[float, str]] = {}
    for axis in SWEPT:
        if axis.more_is_better is None:
            continue
        alike = defaultdict(list)
        for k, row in enumerate(rows):
            others = tuple(value for field, value in row.axes.items() if field != axis.field)
            if row.iteration_s is not None:
                cell = row.axes[axis.field], row.iteration_s, k
                alike[row.workload, row.fabric, row.scheduler, others].append(cell)
        for cells in alike.values():
            least = (float("inf"), 0.0)  # seconds and value of the fastest cell with less
            for value, seconds, k in sorted(cells, reverse=not axis.more_is_better):
                if seconds > least[0] * (1 + _SAME) and least[0] < best.get(k, (float("inf"), ""))[0]:
                    best[k] = least[0], f"{axis.field}={least[1]:g}"
                least = min(least, (seconds, value))
    return [replace(row, anomaly=best[k][1]) if k in best else row for k, row in enumerate(rows)]
