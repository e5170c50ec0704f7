"""Plans for fully sharded training: what is refused, and the code that they stand for."""

import pytest

from legato.core.errors import InputError
from legato.core.wrapping import Group, Wrapping


def groups_in(code):
    """The list of groups that code of a wrapping makes."""
    begin = code.index("groups = [")
    names = {}
    exec(code[begin : code.index("\n]", begin) + 2], names)
    return names["groups"]


@pytest.mark.parametrize(
    ("paths", "lines"),
    [
        ([["embed"], ["head"]], ['(["embed"], True)', '(["head"], True)']),
        ([[f"layers.{k}"] for k in range(30)], ['*(([f"layers.{k}"], True) for k in range(30))']),
        ([["layers.0"], ["layers.1"]], ['(["layers.0"], True)', '(["layers.1"], True)']),
        (
            [["a"], *([f"h.{k}.mlp", f"h.{k + 1}.mlp"] for k in range(2, 12, 2))],
            ['(["a"], True)', '*(([f"h.{k}.mlp", f"h.{k + 1}.mlp"], True) for k in range(2, 12, 2))'],
        ),
        (
            [["embed", *(f"h.{k}" for k in range(4))], *([f"h.{j}" for j in range(k, k + 3)] for k in range(4, 13, 3))],
            [
                '(["embed", *(f"h.{j}" for j in range(4))], True)',
                '*(([f"h.{j}" for j in range(k, k + 3)], True) for k in range(4, 13, 3))',
            ],
        ),
        (
            [["h.1.a", "h.0.b"], ["h.2.a", "h.1.b"], ["h.3.a", "h.2.b"]],
            ['*(([f"h.{k}.a", f"h.{k - 1}.b"], True) for k in range(1, 4))'],
        ),
        ([[f"h.0{k}"] for k in range(3)], [f'(["h.0{k}"], True)' for k in range(3)]),
        ([["h.3"], ["h.2"], ["h.1"]], ['(["h.3"], True)', '(["h.2"], True)', '(["h.1"], True)']),
        ([["h.{0}"], ['h."1"']], ['(["h.{0}"], True)', '(["h.\\"1\\""], True)']),
        ([], []),
    ],
)
def test_code_lists_the_groups_and_counts_where_they_are_regular(paths, lines):
    code = Wrapping("plan", tuple(Group(tuple(group)) for group in paths)).as_code()
    assert groups_in(code) == [(group, True) for group in paths]
    begin = code.index("groups = [")
    shown = code[begin : code.index("\n]", begin)].splitlines()[1:]
    assert shown == [f"    {line}," for line in lines]


def test_groups_that_are_resharded_differently_are_not_counted_together():
    states = [True, True, True, 8, 8, 8, False, True]
    wrapping = Wrapping("plan", tuple(Group((f"h.{k}",), state) for k, state in enumerate(states)))
    assert groups_in(wrapping.as_code()) == [([f"h.{k}"], state) for k, state in enumerate(states)]
    assert {type(state) for _, state in groups_in(wrapping.as_code())} == {bool, int}


def test_what_is_gathered_once_a_step_is_kept():
    wrapping = Wrapping("plan", (Group(("a",)), Group(("b",), 2)), micro_batches=2, sync="gathered-once")
    assert groups_in(wrapping.as_code()) == [(["a"], False), (["b"], False)]


def test_code_says_only_what_differs_from_the_defaults():
    assert Wrapping("plan", (Group(("layer",), False),)).as_code("net") == (
        "from torch.distributed.fsdp import fully_shard\n"
        "\n"
        "options = {}  # for every call of fully_shard: add mp_policy and others here\n"
        "groups = [  # modules that are gathered and reduced together, and reshard_after_forward\n"
        '    (["layer"], False),\n'
        "]\n"
        "for paths, reshard in groups:\n"
        "    fully_shard([net.get_submodule(path) for path in paths], reshard_after_forward=reshard, **options)\n"
        "fully_shard(net, **options)\n"
    )


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ([("a",), ("b", "a")], "groups: 'a' twice"),
        ([("a.b",), ("c", "a")], "groups: 'a.b' is in 'a', too"),
        ([("a", ""), ("c",)], "groups: '' "),
    ],
)
def test_modules_that_overlap_are_refused(groups, message):
    with pytest.raises(InputError, match=f"^{message}"):
        Wrapping("plan", tuple(map(Group, groups)))
