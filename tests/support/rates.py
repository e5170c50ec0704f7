"""Rates that change: disturbances, and when work ends that they delay, in fractions."""

import itertools
import math
from fractions import Fraction

from hypothesis import strategies as st

from legato.simulator.flow import Disturbance

#: Powers of two, and eighths: all sums are exact.
eighths = st.integers(0, 24).map(lambda n: n / 8)


@st.composite
def disturbances(draw, kind="link"):
    start = draw(eighths)
    factor = draw(st.sampled_from([1.0, 2.0, 4.0, math.inf]))
    end = start + draw(st.integers(1, 16)) / 8
    lasts = draw(st.booleans()) and factor < math.inf
    return Disturbance(
        kind=kind, number=draw(st.integers(0, 1)), factor=factor, start_s=start, end_s=math.inf if lasts else end
    )


def served(begin, work, these):
    """When work ends: the first moment at which the integral of the speed, summed up over all moments, is large enough.

    Written apart from the engine: there, the time is followed from one moment to the next; here, the integral from 0
    on is inverted.
    """
    moments = sorted({Fraction(0), *(Fraction(t) for d in these for t in (d.start_s, d.end_s) if t < math.inf)})
    speeds = []
    for moment in moments:
        factors = [d.factor for d in these if d.start_s <= moment < d.end_s]
        speeds.append(Fraction(0) if math.inf in factors else 1 / Fraction(math.prod(factors)))
    done = [Fraction(0)]  # at each moment
    for (start, end), speed in zip(itertools.pairwise(moments), speeds, strict=False):
        done.append(done[-1] + (end - start) * speed)
    k = max(i for i, moment in enumerate(moments) if moment <= begin)
    wanted = done[k] + (begin - moments[k]) * speeds[k] + work
    if work == 0:
        return begin
    k = max(i for i, sofar in enumerate(done) if sofar < wanted)
    return max(begin, moments[k] + (wanted - done[k]) / speeds[k])
