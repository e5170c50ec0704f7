"""Rows of the equality matrix: trainings whose weights have to be DDP's, each in several modes."""

import functools
import inspect
import sys
import zlib

import pytest

from support.automatic import CONTESTS, hastily
from support.ranks import on_ranks
from support.training import compiled, in_double, lent, sharded, under_both

#: What a row runs in, besides as it is; several at once, too.
MODES = {
    "views": lent,
    "four ranks": in_double,
    "sharded optimizer": functools.partial(sharded, "optimizer"),
    "sharded gradients": functools.partial(sharded, "gradients"),
    "compiled": compiled,
    **{f"auto {contest}": functools.partial(hastily, contest) for contest in CONTESTS},
}
SHARDED = ("sharded optimizer", "sharded gradients")
#: Plans are legato's own.
AUTO = tuple(f"auto {contest}" for contest in CONTESTS)


def in_mode(mode, body, *arguments):
    """What `body(*arguments)` returns in all the modes of `mode`."""
    for name in mode:
        body = functools.partial(MODES[name], body)
    return body(*arguments)


def row(*also):
    """Make a test of a body that returns how far its weights are from DDP's, or that trains under a `kind` of two.

    Each row runs as it is. With the modes in `also` it runs again, slowly: in each mode once, and such that any two
    modes that go together meet in some rows. "compiled" and those of `AUTO` go with no other.
    """

    def decorate(body):
        names = list(inspect.signature(body).parameters)
        compared = under_both(body) if names[:1] == ["kind"] else body

        @functools.wraps(body)
        def checked(mode, *arguments):
            found = in_mode(mode, compared, *arguments)
            assert found <= (1e-9 if "four ranks" in mode else 0.0), found
            if late := sys.modules.get("support.late.device"):
                assert not (races := late.races()), races

        inner = [name for name in names if name != "kind"]
        checked.__signature__ = inspect.Signature(
            [inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in ("mode", *inner)]
        )
        test = on_ranks(lambda mode, **_: 4 if "four ranks" in mode else 2)(checked)
        return pytest.mark.parametrize("mode", _cases(also, body.__name__))(test)

    return decorate


def _cases(also, name):
    odd = zlib.crc32(name.encode()) % 2
    views, four = [[mode] if mode in also else [] for mode in ("views", "four ranks")]
    first, second = [[mode] if mode in also else [] for mode in (SHARDED if odd else SHARDED[::-1])]
    together = [[*first, *views, *four], second] if odd else [[*first, *views], [*second, *four]]
    alone = [[mode] for mode in ("compiled", *AUTO) if mode in also]
    cases = [tuple(case) for case in (*together, *alone) if case]
    return [pytest.param((), id="plain"), *(pytest.param(c, id=", ".join(c), marks=pytest.mark.slow) for c in cases)]
