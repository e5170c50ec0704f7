"""Reproductions of five papers: each published number next to the number that legato computes.

There is one file or package per paper.
"""

from __future__ import annotations

from legato.core.errors import unknown_name
from legato.lab.papers import caramel, mg_wfbp, network_operator_edition, pace, tictac
from legato.lab.papers.result import Cell, Figure, Paper, Part, select

__all__ = ["PAPERS", "Cell", "Figure", "Paper", "Part", "paper", "select"]

#: All papers, by their names on the command line.
PAPERS: dict[str, Paper] = {
    module.PAPER.name: module.PAPER for module in (network_operator_edition, mg_wfbp, caramel, tictac, pace)
}


def paper(name: str) -> Paper:
    """Return the named paper. Raises `InputError` with the most similar names if the name is unknown."""
    if name not in PAPERS:
        raise unknown_name("paper", name, PAPERS)
    return PAPERS[name]
