"""The search for groups of modules for fully sharded training: deterministic hill climbing from simple layouts.

The order of FSDP2's collectives is fixed, so a wrapping (a choice of groups) is evaluated in one pass, and nothing has
to be scheduled. The search chooses where groups begin, whether each group's parameters are resharded or kept after its
forward pass, how many groups are gathered ahead in each pass, and how many reductions of gradients may be in flight.
The search looks for the fastest wrapping within a limit on memory. Units: seconds and bytes.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate, product

from legato.fsdp.many import KEEP, NODE, RESHARD, Chain, Layout, evaluate

__all__ = ["by_unit", "every", "fastest"]

#: The number of minimum group sizes that are tried as starts, and the number of starts that the search improves.
_SIZES, _CLIMBED = 24, 2
#: Settings (forward depth, backward depth, buffers) that starts have, and then those that moves try.
_SETTINGS = ((0, 0, 1), (2, 2, 1), (3, 3, 1), (2, 2, 2))
_ALL_SETTINGS = tuple(product((0, 2, 3), (0, 2, 3), (1, 2)))
#: The numbers of last groups that are kept, and the fractions of the groups before them that are resharded to a node.
_KEPT, _IN_NODE = (0, 1, 2, 3), tuple(k / 12 for k in range(13))
#: The most groups, in all layouts together, that are evaluated for one limit. A climb also ends after a round without a
#: gain.
_EVALUATED = 60_000
#: Numbers of moves: this number of the best moves are tried together.
_TOGETHER = (2, 4, 8, 16, 64, 1000)
#: A smaller relative gain is a rounding error.
_LEAST = 1e-9

Score = tuple[bool, float, float]  # (False, seconds, bytes) if the layout fits, otherwise (True, bytes, seconds)


def by_unit(chain: Chain, state: int = RESHARD) -> Layout:
    """Return the layout that is usual without a plan: each unit is a group, and only the last group is kept."""
    begins = tuple(chain.starts)
    return Layout(begins, (*(state for _ in begins[1:]), KEEP))


def every(chain: Chain, count: int, state: int = RESHARD, kept: int = 1) -> Layout:
    """Return the layout of groups of `count` units each; the last `kept` groups are not resharded."""
    begins = tuple(chain.starts[::count])
    kept = min(kept, len(begins))
    return Layout(begins, (*[state] * (len(begins) - kept), *[KEEP] * kept))


def fastest(chain: Chain, limits: Sequence[float]) -> list[Layout | None]:
    """Return the fastest layout found within each limit on the bytes allocated at once, or None if none was found.

    A layout found within one limit is a start for larger limits, so a larger limit never gives a slower layout.
    """
    known = _Known(chain)
    starts = list(dict.fromkeys(_starts(chain)))
    known.look(starts)
    best: dict[float, Layout | None] = {}
    for limit in sorted(set(limits)):
        score = known.score(limit)
        refined = list(dict.fromkeys(_refined(chain, _different(sorted(starts, key=score)))))
        known.look(refined)
        earlier = [layout for layout in best.values() if layout is not None]
        found = min((_climb(known, layout, limit) for layout in _different(sorted(refined, key=score))), key=score)
        found = min((found, *earlier), key=score)
        best[limit] = None if score(found)[0] else found
    return [best[limit] for limit in limits]


def _different(layouts: Iterable[Layout]) -> list[Layout]:
    """Return the first few layouts, no two of which have the same groups."""
    chosen: dict[tuple[int, ...], Layout] = {}
    for layout in layouts:
        chosen.setdefault(layout.begins, layout)
        if len(chosen) == _CLIMBED:
            break
    return list(chosen.values())


class _Known:
    """A cache of evaluated layouts, with their seconds and bytes."""

    def __init__(self, chain: Chain) -> None:
        self.chain = chain
        self.found: dict[Layout, tuple[float, float]] = {}

    def look(self, layouts: Iterable[Layout]) -> None:
        new = [layout for layout in dict.fromkeys(layouts) if layout not in self.found]
        if new:
            seconds, nbytes = evaluate(self.chain, new)
            self.found.update(zip(new, zip(seconds.tolist(), nbytes.tolist(), strict=True), strict=True))

    def score(self, limit: float) -> Callable[[Layout], Score]:
        """Return a sort key for layouts: layouts within the limit first, then the fastest, then the smallest."""

        def of(layout: Layout) -> Score:
            seconds, nbytes = self.found[layout]
            return (False, seconds, nbytes) if nbytes <= limit else (True, nbytes, seconds)

        return of


def _starts(chain: Chain) -> Iterator[Layout]:
    for begins, (forward, backward, buffers) in product(dict.fromkeys(_partitions(chain)), _SETTINGS):
        for layout in _stated(chain, begins, (0, 1, len(begins)), (0.0, 1.0)):
            yield layout._replace(forward=forward, backward=backward, buffers=buffers)


def _refined(chain: Chain, layouts: Iterable[Layout]) -> Iterator[Layout]:
    """Yield each layout, and variants in which other groups are kept, resharded within a node, or resharded fully."""
    for layout in layouts:
        yield layout
        kept = (*_KEPT, *(round(part * len(layout.begins)) for part in _IN_NODE))
        for stated in _stated(chain, layout.begins, kept, _IN_NODE):
            yield layout._replace(states=stated.states)


def _stated(chain: Chain, begins: tuple[int, ...], kept: Iterable[int], in_node: Iterable[float]) -> Iterator[Layout]:
    """Yield layouts that keep the last groups, reshard some groups within a node, and reshard all others fully."""
    count = len(begins)
    for most in sorted({min(k, count) for k in kept}):
        for part in in_node if chain.node is not None else (0.0,):
            node = round(part * (count - most))
            yield Layout(begins, (*[RESHARD] * (count - most - node), *[NODE] * node, *[KEEP] * most))


def _partitions(chain: Chain) -> Iterator[tuple[int, ...]]:
    """Yield divisions into groups: each unit alone, then groups of a minimum size, with the first unit alone or not."""
    yield tuple(chain.starts)
    sizes = [chain.units[u].gathered for u in chain.held]
    total, least = sum(sizes), min(sizes)
    for k in range(_SIZES):
        size = least * (total / least) ** (k / (_SIZES - 1))
        for alone in (1, 0):
            begins, gathered = [0], 0
            for unit in range(1, len(sizes)):
                gathered += sizes[unit - 1]
                if unit in chain.starts and (gathered >= size or (alone and unit == 1)):
                    begins.append(unit)
                    gathered = 0
            yield tuple(begins)


def _climb(known: _Known, layout: Layout, limit: float) -> Layout:
    """Improve a layout until no move is a gain, or too many were tried. Moves in several groups are combined."""
    score, evaluated = known.score(limit), 0
    while evaluated < _EVALUATED / _CLIMBED:
        moves = [*_moves(known.chain, layout)]
        known.look(moved for _, moved in moves)
        before, evaluated = score(layout), evaluated + len(moves) * len(layout.begins)
        better = sorted((score(moved), where, moved) for where, moved in moves if _less(score(moved), before))
        if not better:
            break
        together = [_together(layout, [(where, moved) for _, where, moved in better[:most]]) for most in _TOGETHER]
        known.look(together)
        layout = min((better[0][2], *together), key=score)
    return layout


def _less(one: Score, other: Score) -> bool:
    """Return whether `one` is better than `other` by more than a rounding error."""
    if one[0] != other[0]:
        return one[0] < other[0]
    return one[1] < other[1] * (1 - _LEAST) or (one[1] <= other[1] * (1 + _LEAST) and one[2] < other[2] * (1 - _LEAST))


def _moves(chain: Chain, layout: Layout) -> Iterator[tuple[int, Layout]]:
    """Yield the layout after each possible move, with the group that the move changes (-1 if it changes all)."""
    starts, begins, states = chain.starts, list(layout.begins), list(layout.states)
    ends = [*begins[1:], len(chain.held)]
    sums = list(accumulate((chain.units[u].gathered for u in chain.held), initial=0))
    for k in range(len(begins)):
        inside = starts[bisect_left(starts, begins[k]) + 1 : bisect_left(starts, ends[k])]
        for state in (RESHARD, KEEP, *([NODE] if chain.node is not None else [])):
            if state != states[k]:
                yield k, layout._replace(states=(*states[:k], state, *states[k + 1 :]))
        for cut in {*inside[:1], *inside[-1:], *_middle(inside, sums, begins[k], ends[k])}:
            yield k, _layout(layout, [*begins[: k + 1], cut, *begins[k + 1 :]], [*states[: k + 1], *states[k:]])
        if k == 0:
            continue
        yield k, _layout(layout, [*begins[:k], *begins[k + 1 :]], [*states[:k], *states[k + 1 :]])
        yield k, _layout(layout, [*begins[:k], *begins[k + 1 :]], [*states[: k - 1], *states[k:]])
        place = bisect_left(starts, begins[k])
        for step in (-3, -1, 1, 3):
            if 0 <= place + step < len(starts) and begins[k - 1] < starts[place + step] < ends[k]:
                yield k, _layout(layout, [*begins[:k], starts[place + step], *begins[k + 1 :]], states)
    for forward, backward, buffers in _ALL_SETTINGS:
        yield -1, layout._replace(forward=forward, backward=backward, buffers=buffers)


def _layout(layout: Layout, begins: Sequence[int], states: Sequence[int]) -> Layout:
    return layout._replace(begins=tuple(begins), states=tuple(states))


def _middle(inside: Sequence[int], sums: Sequence[int], begin: int, end: int) -> list[int]:
    """Return the unit at which a group is best divided into halves by bytes, as a list that may be empty."""
    half = (sums[begin] + sums[end]) / 2
    return [min(inside, key=lambda unit: abs(sums[unit] - half))] if inside else []


def _together(layout: Layout, moves: Sequence[tuple[int, Layout]]) -> Layout:
    """Return the layout after several moves in groups that are not neighbours. Earlier moves have priority."""
    begins, states = set(layout.begins), dict(zip(layout.begins, layout.states, strict=True))
    touched: set[int] = set()
    for where, moved in moves:
        if where < 0 or {where - 1, where, where + 1} & touched:
            continue
        touched.add(where)
        after = dict(zip(moved.begins, moved.states, strict=True))
        gone, new = set(layout.begins) - set(moved.begins), set(moved.begins) - set(layout.begins)
        begins = (begins - gone) | new
        states = {begin: state for begin, state in states.items() if begin not in gone}
        states |= {begin: after[begin] for begin in new}
        states |= {
            begin: after[begin]
            for begin, state in zip(layout.begins, layout.states, strict=True)
            if begin in after and after[begin] != state
        }
    order = sorted(begins)
    return _layout(layout, order, [states[begin] for begin in order])
