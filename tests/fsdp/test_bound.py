"""The bound on fully sharded steps: nothing that the rules run is faster, and it is close to what they run."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Iterator
from itertools import product
from statistics import median

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from support.strategies import examples

from legato.core.cluster import LinearCost
from legato.core.errors import InputError
from legato.core.wrapping import Group, Wrapping
from legato.fsdp.bound import lower_bound
from legato.fsdp.costs import Costs
from legato.fsdp.rules import Step, run
from legato.fsdp.units import Precision, Unit

PRECISION = Precision(4, 2, 4)


def _chain(rng: random.Random, count: int) -> tuple[list[Unit], Costs]:
    """Units of one size or of many, with frozen ones, embeddings, units of the root and units without parameters."""
    spread = rng.choice((0.0, 0.3, 1.0))
    base, reduced, adapted = rng.choice((8, 1000, 100_000)), rng.choice((1, 2, 2)), rng.choice((1.0,) * 9 + (0.1,))
    frozen = rng.choice((0, 0, 0, rng.randrange(count)))
    units = []
    for u in range(count):
        nbytes = 0 if rng.random() < 0.07 else int(base * 10 ** rng.uniform(-spread, spread))
        trained = nbytes > 0 and u >= frozen and rng.random() > 0.08
        gradients = max(int((nbytes - rng.choice((0, 0, 0, nbytes // 7))) * adapted), 1) if trained else 0
        scattered = max(int(reduced * nbytes * adapted), 1) if trained else 0
        embeds = rng.random() < (0.5 if u == 0 else 0.07)
        forward_s, ratio, rooted = 10 ** rng.uniform(-spread, spread), rng.choice((0.3, 1, 2, 2)), rng.random() < 0.08
        read = not embeds or rng.random() < 0.3
        sizes = (nbytes, scattered, gradients)
        units.append(Unit(f"u{u}", forward_s, forward_s * ratio, *sizes, trained, not embeds, read, u, rooted))
    if not _held(units):
        return _chain(rng, count)
    return units, _costs(rng, units)


def _costs(rng: random.Random, units: list[Unit]) -> Costs:
    compute_s = sum(unit.forward_s + unit.backward_s for unit in units)
    beta = rng.choice((0.1, 0.5, 1, 2, 4)) * compute_s / 4 / sum(unit.gathered for unit in units)
    alpha = rng.choice((0.001, 0.05, 0.3, 1, 3)) * compute_s / len(units) / 3
    gather = LinearCost(alpha * rng.uniform(0.3, 1), beta, rng.choice((0.0, 0.0, alpha * 1.5)))
    scatter = LinearCost(alpha * rng.uniform(0.3, 1), beta * rng.choice((1, 1, 0.5)))
    return Costs(rng.choice((2, 4, 8, 64, 512)), gather, LinearCost(alpha / 5, beta / 8), scatter)


def _held(units: list[Unit]) -> list[int]:
    return [u for u, unit in enumerate(units) if unit.gathered and not unit.rooted]


def _wrapping(
    units: list[Unit], begins: Iterable[int], states: Iterable[bool | int], depths: tuple[int, int, int]
) -> Wrapping | None:
    """Groups that begin at these places, or None if torch could not run them: a list ends where gradients come back."""
    held, begins = _held(units), list(begins)
    reached = min((u for u, unit in enumerate(units) if unit.trained), default=len(units))
    active = {u for u in held if u >= reached and (units[u].trained or units[u].input_needs_gradient)}
    groups = []
    for begin, end, state in zip(begins, [*begins[1:], len(held)], states, strict=True):
        own = held[begin:end]
        if active.intersection(own) and own[-1] not in active:
            return None
        in_backward = any(units[u].read_in_backward for u in own)
        groups.append(Group(tuple(units[u].path for u in own), state, in_backward))
    return Wrapping("any", tuple(groups), *depths)


def _all(units: list[Unit], node: int | None) -> Iterator[Wrapping | None]:
    count = len(_held(units))
    for cuts in product((False, True), repeat=count - 1):
        begins = [0, *(k + 1 for k, cut in enumerate(cuts) if cut)]
        depths = range(min(4, len(begins) + 1))
        for states in product((True, False, *([node] if node else [])), repeat=len(begins)):
            for chosen in product(depths, depths, (1, 2)):
                yield _wrapping(units, begins, states, chosen)


def _some(rng: random.Random, units: list[Unit], node: int | None) -> Wrapping | None:
    density, choices = rng.choice((0.1, 0.3, 0.6, 1)), [True, False, node or True]
    begins = [0, *(k for k in range(1, len(_held(units))) if rng.random() < density)]
    states = rng.choices(choices, rng.choice(((1, 0, 0), (1, 1, 1), (1, 1, 6), (0, 1, 0), (0, 0, 1))), k=len(begins))
    kept = rng.randint(0, len(begins)) if rng.random() < 0.5 else 0
    states[len(states) - kept :] = [False] * kept
    return _wrapping(units, begins, states, (rng.randint(0, 6), rng.randint(0, 6), rng.randint(1, 3)))


def _check(units: list[Unit], costs: Costs, wrappings: Iterable[Wrapping | None], node: int | None) -> None:
    """No step is faster than the bound for its peak, and none than the bound without a limit."""
    steps = [run(units, wrapping, costs, PRECISION) for wrapping in wrappings if wrapping]
    fastest, above = math.inf, math.inf
    for step in sorted(steps, key=lambda step: (step.peak_nbytes, step.seconds)):
        if step.seconds < fastest:
            fastest = step.seconds
            bound_s = lower_bound(units, costs, step.peak_nbytes, node=node).seconds
            assert bound_s <= fastest
            assert bound_s <= above * (1 + 1e-9)  # more memory never makes it larger
            above = bound_s
    assert lower_bound(units, costs, node=node).seconds <= fastest


@examples(100)
@example(107)  # the root's parameters are freed before the last reductions
@example(244)  # the root computes before the first group's gather is needed
@given(st.integers(0, 2**40))
def test_no_wrapping_of_a_small_model_is_faster(seed: int) -> None:
    rng = random.Random(seed)
    units, costs = _chain(rng, rng.randint(1, 5))
    node = rng.choice((None, None, 2, 4))
    wrappings = list(_all(units, node))
    _check(units, costs, rng.sample(wrappings, min(len(wrappings), 400)), node)


@examples(100)
@given(st.integers(0, 2**40))
def test_no_wrapping_of_a_model_is_faster(seed: int) -> None:
    rng = random.Random(seed)
    units, costs = _chain(rng, rng.choice((5, 8, 12, 20, 40)))
    node = rng.choice((None, None, 2, 8))
    _check(units, costs, (_some(rng, units, node) for _ in range(40)), node)


@pytest.mark.slow
def test_the_fastest_wrapping_of_a_small_model_is_near_the_bound() -> None:
    rng, tight, loose = random.Random(1), [], []
    for _ in range(20):
        spread = rng.choice((0.0, 0.3))
        sizes = [int(1e6 * 10 ** rng.uniform(-spread, spread)) for _ in range(4)]
        units = [Unit(f"u{u}", 1.0, 2.0, nbytes, 2 * nbytes, nbytes, True, u > 0) for u, nbytes in enumerate(sizes)]
        beta = rng.choice((0.3, 0.5, 1, 2)) * 12 / 4 / sum(sizes)
        gather = LinearCost(rng.choice((0.003, 0.03, 0.1, 0.3)), beta)
        costs = Costs(rng.choice((8, 64, 512)), gather, gather, gather)
        steps = [run(units, wrapping, costs, PRECISION) for wrapping in _all(units, None) if wrapping]
        peak = _by_unit(units, costs).peak_nbytes
        fastest_s = min(step.seconds for step in steps if step.peak_nbytes <= peak)
        tight.append(fastest_s / lower_bound(units, costs, peak).seconds)
        loose.append(min(step.seconds for step in steps) / lower_bound(units, costs).seconds)
    assert median(tight) < 1.01 and max(tight) < 1.2
    assert median(loose) < 1.001 and max(loose) < 1.06


def _blocks(count: int, seconds: float) -> list[Unit]:
    return [Unit(f"u{u}", seconds, 2 * seconds, 1000, 2000, 1000, True, u > 0) for u in range(count)]


def _by_unit(units: list[Unit], costs: Costs, state: bool = True) -> Step:
    groups = tuple(Group((unit.path,), state) for unit in units[:-1])
    return run(units, Wrapping("by unit", (*groups, Group((units[-1].path,), False))), costs, PRECISION)


COSTS = Costs(64, LinearCost(1.0, 0.01), LinearCost(0.1, 0.001), LinearCost(2.0, 0.02))


def test_one_unit_takes_what_the_bound_says() -> None:
    units = _blocks(1, 5.0)
    assert _by_unit(units, COSTS).seconds == pytest.approx(11 + 15 + 42)
    bound = lower_bound(units, COSTS)
    assert bound.seconds == pytest.approx(11 + 15 + 42)
    assert str(bound) == "15 s of computation, waiting for 11 s before it and 42 s after it"


def test_equal_blocks_that_hide_all_collectives_but_two_take_what_the_bound_says() -> None:
    units = _blocks(20, 100.0)
    step = _by_unit(units, COSTS)
    assert lower_bound(units, COSTS, step.peak_nbytes).seconds == pytest.approx(11 + 20 * 300 + 42)
    assert step.seconds == pytest.approx(11 + 20 * 300 + 42)


@pytest.mark.parametrize(("kept", "least"), [(True, 1.0), (False, 0.96)])
def test_equal_blocks_that_wait_for_the_network_are_near_the_bound(kept: bool, least: float) -> None:
    """Kept, bytes cross twice, resharded three times, but for what fits into the memory: a part that vanishes."""
    costs = Costs(10**6, LinearCost(0.0, 0.01), LinearCost(0.0, 0.001), LinearCost(0.0, 0.01))
    units = _blocks(200, 0.001)
    step = _by_unit(units, costs, state=not kept)
    bound_s = lower_bound(units, costs, step.peak_nbytes).seconds
    network_s = 200 * (10 + 20 + (0 if kept else 10))
    assert least * network_s <= bound_s <= step.seconds <= 1.01 * network_s


def test_a_large_unit_that_fills_the_memory_makes_the_next_gathers_wait_for_its_reduction() -> None:
    small, large = (1.0, 2.0, 1000, 2000, 1000), (1.0, 2.0, 100_000, 200_000, 100_000)
    units = [Unit(f"u{u}", *(large if u == 10 else small), True, u > 0) for u in range(11)]
    costs = Costs(10**6, LinearCost(0.0, 0.001), LinearCost(0.0, 0.001), LinearCost(0.0, 0.001))
    tight, ample = (lower_bound(units, costs, nbytes) for nbytes in (301_000, 600_000))
    assert tight.backward_s >= 195 > 2 >= ample.backward_s


def test_resharding_to_the_node_needs_less_of_the_network() -> None:
    units, costs = _blocks(64, 0.001), COSTS
    step = _by_unit(units, costs)
    across, inside = (lower_bound(units, costs, 2 * step.peak_nbytes, node=node) for node in (None, 8))
    assert across.backward_s + across.last_s > 1.1 * (inside.backward_s + inside.last_s)


def test_what_does_not_fit_takes_forever() -> None:
    bound = lower_bound(_blocks(3, 1.0), COSTS, 2999)
    assert math.isinf(bound.seconds)
    assert str(bound) == "no wrapping fits into the memory"
    assert math.isfinite(lower_bound(_blocks(3, 1.0), COSTS, 5000).seconds)


def test_what_the_root_holds_is_in_memory_all_the_time() -> None:
    units = [Unit("root", 0.0, 0.0, 10_000, 0, 0, trained=False, rooted=True), *_blocks(3, 1.0)]
    assert math.isinf(lower_bound(units, COSTS, 11_999).seconds)
    assert math.isfinite(lower_bound(units, COSTS, 13_000).seconds)


def test_a_model_without_groups_is_refused() -> None:
    with pytest.raises(InputError, match="units: 1, none of which a group can hold"):
        lower_bound([Unit("u", 1.0, 2.0, 10, 10, 10, rooted=True)], COSTS)
