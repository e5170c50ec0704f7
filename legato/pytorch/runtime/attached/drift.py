"""Detects when training slows down or speeds up under a plan; all ranks measure and compare together.

docs/runtime.md says when they compare, and what counts as a change. A message is complete only after the last rank has
launched it, so ranks that launch it early measure too long a time. The shortest time that any rank measured therefore
counts as the network's time. If two consecutive windows show a change, it is reported, and the new pace becomes the
reference, so a change is reported only once.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence

from legato.pytorch.runtime.sending.messages import Messages
from legato.pytorch.runtime.sending.tracing import Tracer

__all__ = ["DriftMonitor"]

#: Number of backward passes from one sample to the next (`SAMPLE`), and from one comparison to the next (`WINDOW`).
SAMPLE = 50
WINDOW = 200
_TRACED = 2  # traced passes in a sample
#: A change is a pace that is higher or lower by more than this factor.
TOLERANCE = 1.25

#: The pace of one rank: seconds of computation, and seconds with messages on the wire, per pass.
Pace = tuple[float, ...]


class DriftMonitor:
    """Compares the pace of training with the pace in the first passes under a plan.

    `gather(pace)` exchanges paces among the ranks, and returns all paces in the order of the ranks. `new_tracer()`
    makes the tracer that measures a pace.
    """

    def __init__(self, gather: Callable[[Pace], Sequence[Pace]], new_tracer: Callable[[], Tracer] = Tracer) -> None:
        self._gather, self._new_tracer = gather, new_tracer
        self._tracer: Tracer | None = None
        self._samples: list[Pace] = []
        self._next = WINDOW + _TRACED  # the number of passes at which paces are compared next
        self._reference: Sequence[Pace] = ()
        self._suspected = False

    def pass_ended(self, messages: Messages) -> str:
        """Measure the pace, and compare it at the end of a window; call this after each backward pass that sends.

        Returns a description of what has become slower or faster, or an empty string.
        """
        self._sample(messages)
        if messages.passes < self._next:
            return ""
        self._next = messages.passes + WINDOW
        mine = tuple(statistics.median(values) for values in zip(*self._samples, strict=True))
        self._samples.clear()
        return self._judge(self._gather(mine or (0.0, 0.0)))

    def _sample(self, messages: Messages) -> None:
        into = messages.passes % SAMPLE
        if self._tracer is None:
            if into == SAMPLE - _TRACED and messages.tracer is None:  # otherwise, the user is tracing
                messages.tracer = self._tracer = self._new_tracer()
        elif into < SAMPLE - _TRACED and messages.tracer is self._tracer:
            self._tracer.switch(None)
            messages.tracer = None
        elif 0 < into < SAMPLE - _TRACED:  # by now, the last traced messages have arrived
            computing = sum(self._tracer.seconds(kind) for kind in ("forward", "backward", "optimizer"))
            self._samples.append((computing / _TRACED, self._tracer.communication_s / _TRACED))
            self._tracer = None

    def _judge(self, now: Sequence[Pace]) -> str:
        if not all(computing for computing, _ in now):
            return ""  # the user traced during a whole window on some rank
        found = list(_changes(self._reference, now)) if self._reference else []
        if found and not self._suspected:
            self._suspected = True
            return ""
        if found or not self._reference:
            self._reference = now
        self._suspected = False
        return " and ".join(found)


def _changes(before: Sequence[Pace], now: Sequence[Pace]) -> Iterator[str]:
    """Yield descriptions of changes: in the computation of the rank with the largest change, and in the network."""
    factors = [new[0] / old[0] for old, new in zip(before, now, strict=True)]
    rank = max(range(len(factors)), key=lambda r: max(factors[r], 1 / factors[r]))
    if _differs(factors[rank]):
        yield f"computation on rank {rank} takes {factors[rank]:.2f} times as long"
    old, new = (min(pace[1] for pace in paces) for paces in (before, now))
    if old > 0 and new > 0 and _differs(new / old):
        yield f"communication takes {new / old:.2f} times as long"


def _differs(factor: float) -> bool:
    return max(factor, 1 / factor) > TOLERANCE
