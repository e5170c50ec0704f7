"""Few combinations in which every two values of two dimensions meet, in place of all combinations."""

from itertools import combinations, product


def pairs(case):
    """What meets in a case: pairs of (dimension, value)."""
    return set(combinations(enumerate(case), 2))


def covering(dimensions, allowed=lambda *_: True, given=()):
    """Cases beside the given ones, so that every pair of values that meets in an allowed case meets in one of all.

    Greedy: each is the first of those in which most pairs meet that have not met so far.
    """
    cases = [case for case in product(*dimensions) if allowed(*case)]
    left = set().union(*map(pairs, cases)) - set().union(*map(pairs, given))
    chosen = []
    while left:
        chosen.append(max(cases, key=lambda case: len(pairs(case) & left)))
        left -= pairs(chosen[-1])
    return chosen
