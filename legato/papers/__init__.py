"""Floor 3: the five papers, each published number beside ours. One file (or package) a paper."""

from __future__ import annotations

from legato.core.errors import unknown_name
from legato.papers import caramel, mg_wfbp, network_operator_edition, pace, tictac
from legato.papers.result import Cell, Figure, Paper, Part, select

__all__ = ["PAPERS", "Cell", "Figure", "Paper", "Part", "paper", "select"]

#: Every paper by the name that the command line knows it under.
PAPERS: dict[str, Paper] = {
    module.PAPER.name: module.PAPER for module in (network_operator_edition, mg_wfbp, caramel, tictac, pace)
}


def paper(name: str) -> Paper:
    """One of `PAPERS`. Raises `InputError` with the nearest names."""
    if name not in PAPERS:
        raise unknown_name("paper", name, PAPERS)
    return PAPERS[name]
