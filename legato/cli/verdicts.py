"""Verdicts on jobs, as text and as JSON."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from legato.cli.output import note, print_table, say

if TYPE_CHECKING:
    from legato.advice import Advice, Verdict

__all__ = ["as_json", "print_verdict"]


def as_json(verdict: Verdict) -> dict[str, Any]:
    """Return what `--json` prints for a verdict."""
    return {"jobs": [_summary(advice) for advice in verdict.advice], "changes": verdict.changes}


def print_verdict(verdict: Verdict) -> None:
    """Print the verdict on one job, or on two jobs and the changes between them."""
    from legato.advice import asides, to_try

    for advice, parts in verdict.said():
        for part in parts:
            say(part) if isinstance(part, str) else print_table(part)
        for line in to_try(advice):
            say(line)
        for line in asides(advice):
            note(line)


def _summary(advice: Advice) -> dict[str, Any]:
    drawn = ("plans", "timelines", "comparison")
    found = {name: getattr(advice, name) for name in advice.__struct_fields__ if name not in drawn}
    return found | {"rows": () if advice.comparison is None else advice.comparison.rows}
