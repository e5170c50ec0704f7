"""Find cells that are slower than the same cell with a slower link, a longer latency or fewer servers.

Graham (Bounds on Multiprocessing Timing Anomalies, SIAM Journal on Applied Mathematics 17, 1969) showed that a schedule
with fixed priorities can take longer when ops get faster or machines are added. Networks have the same anomalies: if
one transfer on a link ends earlier, a second transfer may start before a third one that is more urgent.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from msgspec.structs import replace

from legato.core.axes import SWEPT
from legato.reports.model import SweepRow

__all__ = ["mark_anomalies"]

#: Differences up to this fraction do not count, because schedulers that search are not more exact.
_SAME = 1e-3


def mark_anomalies(rows: Sequence[SweepRow]) -> list[SweepRow]:
    """Return the rows; a row has an `anomaly` if a cell that is worse on one axis is faster by more than 0.1%.

    The cells are equal on all other axes. The anomaly is `AXIS=VALUE` of the fastest worse cell.
    """
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
            least = (float("inf"), 0.0)  # seconds and value of the fastest cell with a worse value
            for value, seconds, k in sorted(cells, reverse=not axis.more_is_better):
                if seconds > least[0] * (1 + _SAME) and least[0] < best.get(k, (float("inf"), ""))[0]:
                    best[k] = least[0], f"{axis.field}={least[1]:g}"
                least = min(least, (seconds, value))
    return [replace(row, anomaly=best[k][1]) if k in best else row for k, row in enumerate(rows)]
