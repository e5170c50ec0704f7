"""Planned groups of fully sharded training, compared with a long search and with the lower bound.

    python benchmarks/fully_sharded.py                       # models at the same memory, at 1.5 times and at twice
    python benchmarks/fully_sharded.py --random 100          # random chains of layers instead of models
    python benchmarks/fully_sharded.py --search 20           # next to a random search of 20 rounds in each cell

Everything is simulated by FSDP2's rules (docs/fully_sharded.md). A cell is a model, a ratio of communication (two
gathers and a reduce-scatter of all parameters) to computation, a startup time of a collective, and a memory limit. The
limit is a multiple of the memory that one group for each block takes. Parameters are bf16, gradients are reduced in
fp32, and a group may be resharded to a node of 8 ranks (with `--node 0`, it may not).
"""

from __future__ import annotations

import argparse
import itertools
import math
import random
import statistics
import time
from collections.abc import Iterator

from legato.core.cluster import LinearCost
from legato.fsdp.bound import lower_bound
from legato.fsdp.costs import Costs
from legato.fsdp.many import KEEP, NODE, RESHARD, Chain, Layout, evaluate
from legato.fsdp.planner import by_unit, fastest
from legato.fsdp.units import Precision, Unit, units_of
from legato.zoo import workload

BF16 = Precision(4, 2, 4)
RATIOS, ALPHAS, MEMORIES = (0.3, 0.5, 1.0, 2.0), (2e-5, 1e-4, 3e-4, 1e-3), (1.0, 1.5, 2.0)


def chain_of(layers: list[tuple[str, float, float]]) -> list[Unit]:
    """Units of (name, parameters, multiply-adds), with a backward pass of twice the forward pass's time."""
    units = []
    for k, (name, parameters, products) in enumerate(layers):
        size, seconds = 2 * int(parameters), products / 1e14
        units.append(Unit(name, seconds, 2 * seconds, size, 2 * size, size, True, k > 0, named=k))
    return units


def convnext() -> list[Unit]:
    """ConvNeXt-L (Liu et al. 2022) on 64 images of 224 x 224."""
    layers = []
    for stage, (depth, width, side) in enumerate(
        zip((3, 3, 27, 3), (192, 384, 768, 1536), (56, 28, 14, 7), strict=True)
    ):
        for block in range(depth):
            layers.append((f"{stage}.{block}", 8 * width**2 + 49 * width, 64 * side**2 * (8 * width**2 + 49 * width)))
    return chain_of([*layers, ("head", 1536 * 1000, 64 * 1536 * 1000)])


def unet() -> list[Unit]:
    """A U-Net like Stable Diffusion's (Rombach et al. 2022), by residual and attention blocks, on 16 latents."""
    layers = []
    down = [(320, 64), (640, 32), (1280, 16), (1280, 8)]
    for part, stages in (("down", down), ("up", down[::-1])):
        for width, side in stages:
            for block in range(2 if part == "down" else 3):
                inside = 2 * width if part == "up" else width  # what the other half hands over comes in, too
                residual = 9 * inside * width + 9 * width**2
                attention = 16 * width**2 if side > 8 else 0
                layers.append(
                    (f"{part}{width}.{side}.{block}", residual + attention, 16 * side**2 * (residual + attention))
                )
    return chain_of(layers)


def vision_language() -> list[Unit]:
    """A vision tower of 24 layers before a language model of 28 (3 billion parameters), 576 patches, 1,024 tokens."""
    tower = [(f"vision.{k}", 12 * 1024**2, 8 * 576 * 12 * 1024**2) for k in range(24)]
    words = [("embedding", 32_000 * 2560, 1e6)]
    language = [(f"layers.{k}", 12 * 2560**2, 2 * 1600 * 12 * 2560**2) for k in range(28)]
    return chain_of([*tower, *words, *language, ("head", 32_000 * 2560, 2 * 1600 * 32_000 * 2560)])


def whisper() -> list[Unit]:
    """Whisper large (Radford et al. 2022): 32 layers on 1,500 frames, then 32 on 448 tokens."""
    encoder = [(f"encoder.{k}", 12 * 1280**2, 8 * 1500 * 12 * 1280**2) for k in range(32)]
    decoder = [(f"decoder.{k}", 16 * 1280**2, 8 * 448 * 16 * 1280**2) for k in range(32)]
    return chain_of([*encoder, ("embedding", 51_866 * 1280, 1e6), *decoder])


def vit() -> list[Unit]:
    """ViT-L/16 (Dosovitskiy et al. 2021) on 64 images."""
    layers = [(f"layers.{k}", 12 * 1024**2, 64 * 197 * 12 * 1024**2) for k in range(24)]
    return chain_of([("patches", 768 * 1024, 64 * 196 * 768 * 1024), *layers, ("head", 1024 * 1000, 64 * 1024 * 1000)])


def of_zoo(name: str, level: int = 1) -> list[Unit]:
    return units_of(workload(name), 64, BF16, level=level)


MODELS = {
    "unet": unet,
    "convnext-l": convnext,
    "resnet-50": lambda: of_zoo("resnet-v1-50", 2),
    "vlm-3b": vision_language,
    "whisper": whisper,
    "vit-l": vit,
    "bert": lambda: of_zoo("bert-base"),
    "llama-3-8b": lambda: of_zoo("llama-3-8b"),
    "mixtral-8x7b": lambda: of_zoo("mixtral-8x7b"),
}


def random_units(seed: int) -> list[Unit]:
    """Stages of layers; from one to the next, parameters and products change by any factor up to 8."""
    draw = random.Random(seed)
    layers: list[tuple[str, float, float]] = []
    size, products = 1e6, 1e11
    for stage in range(draw.randint(2, 5)):
        size *= 8 ** draw.uniform(-1, 1)
        products *= 8 ** draw.uniform(-1, 1)
        layers += [
            (f"{stage}.{k}", size * draw.uniform(0.8, 1.25), products * draw.uniform(0.8, 1.25))
            for k in range(draw.randint(2, 16))
        ]
    return chain_of(layers)


def cells(units: list[Unit], node: int | None) -> Iterator[tuple[float, float, Chain]]:
    compute_s = sum(unit.forward_s + unit.backward_s for unit in units)
    for ratio, alpha in itertools.product(RATIOS, ALPHAS):
        beta = ratio * compute_s / sum(2 * unit.gathered + unit.scattered for unit in units)
        across, inside = LinearCost(alpha, beta), LinearCost(alpha / 5, beta / 8)
        yield ratio, alpha, Chain(units, Costs(64, across, inside, across), BF16, node)


def searched(chain: Chain, start: Layout, limit: float, rounds: int, seed: int) -> float:
    """The least seconds that simulated annealing finds: a few hundred random changes a round, cooler each time."""
    draw = random.Random(seed)
    best = layout = start
    (least,) = best_s = evaluate(chain, [start])[0]
    now = least
    for k in range(rounds):
        for _ in range(12):
            tried = [_changed(chain, layout, draw) for _ in range(25)]
            seconds, nbytes = evaluate(chain, tried)
            heat = 0.02 * least * (1 - k / rounds) ** 2
            for found, found_s, held in zip(tried, seconds, nbytes, strict=True):
                if held <= limit and (found_s < now or (heat and draw.random() < math.exp((now - found_s) / heat))):
                    layout, now = found, float(found_s)
                    if now < least:
                        best, least = layout, now
        layout, now = best, least
    assert best_s is not None
    return least


def _changed(chain: Chain, layout: Layout, draw: random.Random) -> Layout:
    begins, states = list(layout.begins), list(layout.states)
    for _ in range(draw.choice([1, 1, 2, 3])):
        what, k = draw.randrange(4), draw.randrange(len(begins))
        if what == 0 and k:
            del begins[k], states[k]
        elif what == 1 and (free := sorted(set(chain.starts) - set(begins))):
            begin = draw.choice(free)
            place = sum(other < begin for other in begins)
            begins.insert(place, begin)
            states.insert(place, states[place - 1])
        elif what == 2:
            states[k] = draw.choice([RESHARD, KEEP, *([NODE] if chain.node else [])])
        else:
            layout = layout._replace(forward=draw.choice([0, 2, 3]), backward=draw.choice([0, 2, 3]))
            layout = layout._replace(buffers=draw.choice([1, 2]))
    return layout._replace(begins=tuple(begins), states=tuple(states))


def quantiles(values: list[float]) -> str:
    ordered = sorted(values)
    return f"{statistics.median(ordered):7.3f} {ordered[int(0.9 * (len(ordered) - 1))]:7.3f} {ordered[-1]:7.3f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(MODELS), help="comma-separated names")
    parser.add_argument("--random", type=int, default=0, metavar="N", help="N random chains instead of models")
    parser.add_argument(
        "--search", type=int, default=0, metavar="ROUNDS", help="rounds of a random search in each cell"
    )
    parser.add_argument("--node", type=int, default=8, help="ranks of a node; 0: no resharding to nodes")
    arguments = parser.parse_args()
    models = {f"random {k}": random_units(k) for k in range(arguments.random)}
    models = models or {name: MODELS[name]() for name in arguments.models.split(",")}
    columns: dict[float, dict[str, list[float]]] = {
        m: {"win": [], "gap": [], "block": [], "search": []} for m in MEMORIES
    }
    took = []
    for name, units in models.items():
        wins: dict[float, list[float]] = {memory: [] for memory in MEMORIES}
        for k, (ratio, alpha, chain) in enumerate(cells(units, arguments.node or None)):
            (block_s,), (block,) = evaluate(chain, [by_unit(chain)])
            begun = time.process_time()
            plans = fastest(chain, [memory * block for memory in MEMORIES])
            took.append((time.process_time() - begun) / len(MEMORIES))
            for memory, layout in zip(MEMORIES, plans, strict=True):
                assert layout is not None
                (seconds,), _ = evaluate(chain, [layout])
                bound_s = lower_bound(units, chain.costs, int(memory * block), node=chain.node).seconds
                found = columns[memory]
                found["win"].append(block_s / seconds)
                found["gap"].append(seconds / bound_s - 1)
                found["block"].append(block_s / bound_s - 1)
                if ratio in (1.0, 2.0):
                    wins[memory].append(block_s / seconds)
                if arguments.search:
                    least_s = searched(chain, layout, memory * block, arguments.search, k)
                    found["search"].append(seconds / least_s)
            del alpha
        if not arguments.random:
            print(
                f"{name:14} {len(units):4} units, best win at ratios 1 and 2:",
                *(f"{max(wins[m]):.3f}" for m in MEMORIES),
            )
    print(f"\n{'median, 90%, worst of all cells':34}" + "".join(f"{f'memory x{m}':>26}" for m in MEMORIES))
    heads = {"win": "one group a block / plan", "gap": "plan above bound", "block": "one group a block above bound"}
    for key, head in (heads | ({"search": "plan / long search"} if arguments.search else {})).items():
        print(f"{head:34}" + "".join(f"{quantiles(columns[memory][key]):>26}" for memory in MEMORIES))
    median, most = statistics.median(took) * 1e3, max(took) * 1e3
    print(f"planned in {median:.0f} ms a row (median of CPU time), {most:.0f} ms at most")


if __name__ == "__main__":
    main()
