"""Programs: what is none is refused in one line."""

import math

import pytest
from msgspec.structs import replace

from legato.core.errors import InputError
from legato.core.files import decode, encode
from legato.core.program import Communication, Compute, Lane, Program, Start, Wait

PAIRS = ((0, 2), (1, 3))
GATHER, REDUCE = (Communication("data", operation, PAIRS, 8.0) for operation in ("all_gather", "reduce_scatter"))
EARLIER = r"communication 0 \(data all_gather\): after \d \(expected one that its lanes start before\)"
FORTH, BACK = (Communication("pipeline", "send", groups, 8.0) for groups in (PAIRS, ((2, 0), (3, 1))))


def program(first, second, *communications):
    return Program("P", (Lane((0, 1), first), Lane((2, 3), second)), communications)


def test_valid_programs():
    both = (Compute(1.0), Start(0), Compute(2.0), Wait(0), Start(1), Wait(1))
    value = program(both, both, GATHER, REDUCE)
    assert decode(encode(value)) == value
    program((Start(0), Wait(1)), (Wait(0), Start(1)), FORTH, BACK)
    program((Start(0), Start(1)), (Start(0), Wait(1)), GATHER, FORTH)
    program((Start(1), Start(0)), (Start(1), Start(0)), replace(GATHER, after=1), REDUCE)


@pytest.mark.parametrize(
    ("first", "second", "communications", "message"),
    [
        ((Start(0),), (), [GATHER], r"communication 0 \(data all_gather\): never started by lane 1"),
        ((Start(0), Start(0)), (Start(0),), [GATHER], "started twice by lane 0"),
        ((Start(0),), (Start(0),), [FORTH], "started by lane 1, which has no part"),
        ((Start(0), Start(1)), (Start(1), Start(0)), [GATHER, REDUCE], "started in another order"),
        ((Start(0), Start(1)), (Start(0), Start(1)), [replace(GATHER, after=1), REDUCE], EARLIER),
        ((Start(0),), (Start(0),), [replace(GATHER, after=0)], EARLIER),
        ((Start(0),), (Start(0),), [replace(GATHER, after=1)], EARLIER),
        ((Start(1), Start(0)), (Start(0),), [replace(GATHER, after=1), FORTH], EARLIER),
        ((Wait(1), Start(0)), (Wait(0), Start(1)), [FORTH, BACK], "lane [01]: waits for communication [01] .*circle"),
        ((Wait(0), Start(0)), (Start(0),), [GATHER], "lane 0: waits for communication 0 .*circle"),
        ((Wait(2),), (), [], r"communication: 2 \(expected below 0\)"),
        ((), (), [Communication("data", "all_gather", ((0, 4),), 1.0)], r"worker 4 \(expected 0 to 3\)"),
        ((), (), [Communication("data", "all_gather", ((0, 2), (3, 1)), 1.0)], "several lanes at one place"),
        ((Start(0),), (), [Communication("x", "send", ((0, 1),), 1.0)], "from a lane to itself"),
        ((), (), [Communication("data", "all_gather", ((0, 2),), 1.0)], "only some workers of a lane"),
    ],
)
def test_what_is_no_program(first, second, communications, message):
    with pytest.raises(InputError, match=message):
        program(first, second, *communications)


def test_workers_are_on_one_lane_each():
    for lanes in [(), (Lane((0, 0), ()),), (Lane((1,), ()),), (Lane((0,), ()), Lane((), ()))]:
        with pytest.raises(InputError, match="lanes: "):
            Program("P", lanes)


@pytest.mark.parametrize("groups", [(), ((0,),), ((0, 1), (2, 3, 4)), ((0, 1), (1, 2))])
def test_groups(groups):
    with pytest.raises(InputError, match="groups of data all_reduce"):
        Communication("data", "all_reduce", groups, 1.0)


def test_numbers():
    for value in (-1.0, math.nan, math.inf):
        with pytest.raises(InputError, match="seconds of 'x'"):
            Compute(value, "x")
        with pytest.raises(InputError, match="nbytes of data all_reduce"):
            Communication("data", "all_reduce", ((0, 1),), value)
    with pytest.raises(InputError, match="times of data all_reduce: 0"):
        Communication("data", "all_reduce", ((0, 1),), 1.0, 0)
    with pytest.raises(InputError, match="expected 2 workers"):
        Communication("pipeline", "send", ((0, 1, 2),), 1.0)
