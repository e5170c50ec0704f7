"""Random chains of units for fully sharded training, with the costs of a network."""

import random

from legato.core.cluster import LinearCost
from legato.fsdp.costs import Costs
from legato.fsdp.many import KEEP, NODE, RESHARD, Layout
from legato.fsdp.units import Precision, Unit


def random_chain(seed, *, most=8, plain=False):
    """(units, costs, precision): with frozen units, and units that only the root can hold, unless `plain`."""
    draw = random.Random(seed)
    count = draw.randint(1, most)
    precision = Precision(4, draw.choice([2, 4]), 4)
    frozen = draw.choice([0, 0, draw.randrange(count)])
    rates = (0.0, 0.0) if plain else (draw.choice([0.0, 0.0, 0.3]), draw.choice([0.0, 0.0, 0.3]))
    units = []
    for i in range(count):
        trained = plain or (i >= frozen and draw.random() >= rates[0]) or i == count - 1
        gathered = draw.choice([2, 2, 2, 8, 1]) * 64 * draw.randint(1, 20)
        reduced = gathered * 4 // precision.gathered if trained else 0
        rooted = draw.random() < rates[1] and count > 1 and i < count - 1
        forward_s, own = draw.random(), gathered if trained else 0
        unit = Unit(f"u{i}", forward_s, 2 * draw.random(), gathered, reduced, own, trained, i > 0, named=i)
        table = not plain and i > 0 and draw.random() < 0.1
        units.append(unit._replace(rooted=rooted, input_needs_gradient=i > 0 and not table))
    alpha, beta = draw.choice([0, 0.01, 0.3]), draw.choice([0, 1e-4, 1e-3])
    gather, inside, scatter = LinearCost(alpha, beta), LinearCost(alpha / 5, beta / 8), LinearCost(alpha, beta / 2)
    return units, Costs(8, gather, inside, scatter, copy_s_per_byte=draw.choice([0, 1e-5])), precision


def random_layouts(seed, chain, count=12):
    """Layouts of a chain, with every state and depth."""
    draw = random.Random(seed)
    states = (RESHARD, RESHARD, KEEP, NODE) if chain.node else (RESHARD, KEEP)
    layouts = []
    for _ in range(count):
        begins = (0, *(k for k in chain.starts[1:] if draw.random() < 0.5))
        depths = draw.choice([0, 0, 2, 3]), draw.choice([0, 0, 2, 3]), draw.choice([1, 1, 2, 3])
        layouts.append(Layout(begins, tuple(draw.choice(states) for _ in begins), *depths))
    return layouts
