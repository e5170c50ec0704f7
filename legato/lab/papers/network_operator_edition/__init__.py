"""How to Train your DNN: The Network Operator Edition (Chang, Bottini, Jian, Kumar, Panda, Shenker, 2020).

`published.py` has the paper's numbers, and `model.py` rebuilds its traces. `tables.py`
and `figures.py` compute cells and figures from the traces.
"""

from __future__ import annotations

from legato.lab.papers.network_operator_edition.figures import FIGURES
from legato.lab.papers.network_operator_edition.model import FITTED_BACKWARD_S
from legato.lab.papers.network_operator_edition.published import TABLE_1_GBPS
from legato.lab.papers.network_operator_edition.tables import TABLES
from legato.lab.papers.result import Paper

__all__ = ["PAPER"]

PAPER = Paper(
    name="network-operator-edition",
    title="How to Train your DNN: The Network Operator Edition",
    parts={**TABLES, **FIGURES},
    constants={
        **{
            f"{model}, backward pass after its first layer: {seconds:g} s": "fitted to the ring column of Table 8"
            for model, seconds in FITTED_BACKWARD_S.items()
        },
        f"bandwidth of Table 1: {TABLE_1_GBPS:g} Gbps": "not printed; all four models with one server agree on it",
        "backward pass up to the first gradient: 0 s": "the paper's traces begin with the first gradient",
    },
    left_out={
        "Table 1, Real": "measured on EC2; the paper's own simulation misses it by up to 78%",
        "Table 2, layers": "its count mixes weight and pooling layers in a way that the paper does not define",
        "Table 2, weights": "contradict the paper's own sizes by factors of 9 to 29 for three models; not reproducible",
        "Table 3, forward and backward times": "inputs: measured by the authors, used as they are (literal)",
        "Table 5": "quoted from another benchmark's page; not an output of the simulator",
        "Table 1, VGG-16 on 8 PS in forward order": (
            "in forward order, a server sends the largest parameter last, so workers start one by one, and half of the "
            "incast is hidden; the published time fits a random order, which is also shown"
        ),
        "Table 9, Inception-v3 without barrier": (
            "0.988 s for two iterations leaves less time for computation than the ring column; literal fits the "
            "0.988 s, and fitted fits the ring column"
        ),
        "9.2, message pipelining": (
            "holds except for VGG-16 with multicast and aggregation, where a switch that forwards whole parameters is "
            "the bottleneck: pipelining saves 29% there"
        ),
        "Figs. 4 and 5, ring ahead at all bandwidths": (
            "Resnet-200 at 5 Gbps and VGG-16 above 25 Gbps are faster with multicast and aggregation, which overlap "
            "distribution with the forward pass"
        ),
        "Fig. 8, 2x with 4 workers and 1.3x with 32": "the latter contradicts Table 8, which has 0.765 / 0.683 = 1.12",
        "Fig. 9, growth with network-heavy modules": (
            "by its FLOPs, a 17x17x768 module is as compute-bound as the whole model; the speedup settles at 2.9"
        ),
        "Fig. 10, multicast alone equal at 25 modules": "here, they are equal at 75 modules",
        "Figs. 3 to 12, the curves": "printed only as pictures; the paper's statements about them are checked",
    },
)
