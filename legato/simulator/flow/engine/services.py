"""Services on links and streams, which wait for one another. The engine runs nothing else.

[Note: one primitive] A *service* keeps one link busy for `work_s` seconds. A service is ready when all services for
which it waits have released it. A link serves ready services first come, first served. A service A releases another
service B in one of two ways:

- *after*: `delay_s` after the end of A;
- *cut through*: `delay_s` after the start of A. B then ends at least `delay_s` after the end of A, because the last
  bytes of a message have to arrive before they are forwarded.

*After* and *cut through* are enough for all fabrics. A transfer is a service on the sender's link, which releases a
service on the receiver's link, cut through. In multicast, one service releases several services cut through. In
in-network aggregation, several services release one service, cut through or after. Computation is a service on no link.
A barrier is a service that takes no time.

If a transfer crosses a slow link and then a faster link, the faster link is busy only for its own `work_s`, although
the last bytes pass later. Until these bytes pass, the faster link can serve other services.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

__all__ = ["NO_LINK", "NO_PROFILES", "SERVICE", "Ids", "ServiceProfiles", "Services"]

Ids = NDArray[np.int32]

NO_LINK = -1

#: One cache line per service: all data that the engine needs to run a service. Before a service has run, `begin_s` and
#: `end_s` are lower bounds; afterwards they are its times. `next` is private to the engine.
SERVICE = np.dtype(
    [
        ("begin_s", "f8"),
        ("end_s", "f8"),
        ("work_s", "f8"),
        ("delay_s", "f8"),
        ("key", "i8"),
        ("first", "i4"),
        ("count", "i4"),
        ("link", "i4"),
        ("missing", "i4"),
        ("next", "i4"),
    ],
    align=True,
)


class Services(NamedTuple):
    """A graph of services in the form that the engine runs, with `num_links` links.

    Service i releases `successors[first_i : first_i + count_i]`. Each of these entries is twice a service's id, plus 1
    if this service is released cut through.
    """

    records: NDArray[Any]
    successors: Ids
    num_links: int


class ServiceProfiles(NamedTuple):
    """The profiles of services in the engine's form, for links and workers that disturbances slow down.

    Service i has the profile `profile_of[i]`, or none (-1). Profile p has the entries `first[p]:first[p + 1]` of
    `start_s` and `factor`. If nothing is disturbed, `profile_of` is empty.
    """

    profile_of: NDArray[np.int32]
    first: NDArray[np.int64]
    start_s: NDArray[np.float64]
    factor: NDArray[np.float64]


NO_PROFILES = ServiceProfiles(np.empty(0, np.int32), np.empty(0, np.int64), np.empty(0), np.empty(0))
