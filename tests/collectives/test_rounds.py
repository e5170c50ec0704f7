"""Rounds are data: what they cost, what each rank does and what links carry are the same thing."""

from collections import Counter

import numpy as np
import pytest

from legato.collectives import COLLECTIVES, DIVIDED
from legato.collectives.rounds import steps
from legato.core.workload import Op, Tensor, Workload
from legato.simulator.flow import Network
from legato.simulator.flow.iterations.run import compile_flow

RANKS = range(2, 18)
#: Divisible by all numbers of parts of 17 or fewer ranks.
NBYTES = 12_252_240


def halves_of(name, ranks):
    """The steps of all ranks in each half."""
    return zip(*(steps(COLLECTIVES[name], rank, ranks) for rank in range(ranks)), strict=True)


@pytest.mark.parametrize("ranks", [1, *RANKS, 24, 31, 40])
@pytest.mark.parametrize("name", COLLECTIVES)
def test_rounds_add_everything_once_and_hand_it_to_everybody(name, ranks):
    parts = COLLECTIVES[name].rounds(ranks).parts
    held = [[{rank} for _ in range(parts)] for rank in range(ranks)]  # whose numbers are in the sum
    for half, adds in zip(halves_of(name, ranks), (True, False), strict=True):
        assert len({len(own) for own in half}) == 1
        for step in range(len(half[0])):
            before = [[set(part) for part in mine] for mine in held]
            sent = {(r, t.peer, t.start, t.stop) for r in range(ranks) for t in half[r][step].sends}
            taken = {(t.peer, r, t.start, t.stop) for r in range(ranks) for t in half[r][step].receives}
            assert sent == taken
            for giver, taker, start, stop in sent:
                for part in range(start, stop):
                    if adds:
                        assert not held[taker][part] & before[giver][part]
                        held[taker][part] |= before[giver][part]
                    else:
                        assert len(before[giver][part]) == ranks
                        held[taker][part] = before[giver][part]
    assert all(len(part) == ranks for mine in held for part in mine)


@pytest.mark.parametrize("name", COLLECTIVES)
def test_halves_leave_everyone_who_adds_up_with_a_part(name):
    """In a collective that can be sent in halves, each part is complete on exactly one rank after the first."""
    for ranks in RANKS:
        reduce, _ = halves_of(name, ranks)
        parts = COLLECTIVES[name].rounds(ranks).parts
        away = Counter(part for own in reduce for step in own for t in step.sends for part in range(t.start, t.stop))
        alone = all(count == ranks - 1 for count in away.values()) and len(away) == parts > 1
        assert alone == (name in DIVIDED)


@pytest.mark.parametrize("ranks", [*RANKS, 24, 31, 48])
@pytest.mark.parametrize("name", COLLECTIVES)
def test_costs_are_those_of_the_rounds(name, ranks):
    """Latencies: the longest way from rank to rank. Sends and bytes: those of the busiest rank in each round."""
    algorithm = COLLECTIVES[name]
    begins, waits, sent, added = [0] * ranks, 0, 0, 0
    for half, adds in zip(halves_of(name, ranks), (True, False), strict=True):
        for step in zip(*half, strict=True):
            received = [max((begins[taken.peer] + 1 for taken in own.receives), default=0) for own in step]
            begins = [max(times) for times in zip(begins, received, strict=True)]
            moved = max(sum(t.stop - t.start for t in own.sends) for own in step)
            waits += max(max(len(own.sends) for own in step) - 1, 0)
            sent, added = sent + moved, added + moved * adds
    parts = algorithm.rounds(ranks).parts
    assert algorithm.cost(ranks, 1.0, 0.0, 0.0, 0.0)[0] == max(begins)
    assert algorithm.cost(ranks, 0.0, 0.0, 0.0, 1.0)[0] == waits
    assert algorithm.cost(ranks, 0.0, 1.0, 0.0, 0.0)[1] * parts == pytest.approx(sent, rel=1e-12)
    assert algorithm.cost(ranks, 0.0, 0.0, 1.0, 0.0)[1] * parts == pytest.approx(added, rel=1e-12)


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("name", COLLECTIVES)
def test_links_carry_what_ranks_send(name, ranks):
    """Each transfer of the flow simulator is one of a rank's, with the bytes of its parts, out of it and into its peer;
    and the transfers of a rank are numbered as it makes them."""
    one = Workload("w", (Op("f", "forward", 0.0), Op("b", "backward", 0.0, (0,))), (Tensor("w", NBYTES, 1, (0,)),))
    network = Network(workers=ranks, bandwidth_bps=8.0)
    records = compile_flow(one, None, name, network, symmetry=False).graph.freeze(2 * ranks).records
    parts = COLLECTIVES[name].rounds(ranks).parts
    for rank, *halves in zip(range(ranks), *halves_of(name, ranks), strict=True):
        mine = [step for half in halves for step in half]
        for side, link in (("sends", 2 * rank), ("receives", 2 * rank + 1)):
            expected = [(t.stop - t.start) * NBYTES // parts for step in mine for t in getattr(step, side)]
            assert np.array_equal(records["work_s"][records["link"] == link], expected)
