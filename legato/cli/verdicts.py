"""How verdicts on jobs are shown: printed, as JSON, and as a page."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from legato.cli.output import note, print_text, say

if TYPE_CHECKING:
    from collections.abc import Sequence

    from legato.advice import Advice
    from legato.ingest.traced import Imported

__all__ = ["as_json", "print_verdicts", "write_page"]


def as_json(found: Sequence[Advice], changed: Sequence[str]) -> dict[str, Any]:
    """What `--json` prints of the verdicts on one job, or two."""
    return {"jobs": [_summary(advice) for advice in found], "changes": changed}


def print_verdicts(found: Sequence[Advice], changed: Sequence[str]) -> None:
    """Print the verdicts on one job, or two, the second with what changed."""
    from legato.advice import asides, to_try, told

    for number, advice in enumerate(found, 1):
        for part in told(advice, changed if number == len(found) else ()):
            say(part) if isinstance(part, str) else print_text(part, part.heads[0])
        for line in to_try(advice):
            say(line)
        for line in asides(advice):
            note(line)


def _summary(advice: Advice) -> dict[str, Any]:
    drawn = ("plans", "timelines", "comparison")
    found = {name: getattr(advice, name) for name in advice.__struct_fields__ if name not in drawn}
    return found | {"rows": () if advice.comparison is None else advice.comparison.rows}


def write_page(output: Path, jobs: Sequence[Imported], found: Sequence[Advice], changed: Sequence[str]) -> None:
    """Write the report on one job, or two."""
    from legato.advice import COUNTED, asides, headline, told
    from legato.report.html import write_report
    from legato.report.model import ModelReport, Report

    def section(job: Imported, advice: Advice) -> ModelReport:
        verdict = headline(advice)
        said = told(advice, changed if advice is found[-1] else ())
        return ModelReport(
            advice.name,
            job.workload,
            advice.cluster,
            timelines=advice.timelines or tuple(t for t in [job.timeline] if t is not None),
            plans=advice.plans,
            told=tuple(part for part in said if part != verdict),
            asides=asides(advice),
            verdict=verdict,
            code=advice.code,
            computation=COUNTED,
        )

    write_report(output, Report(tuple(map(section, jobs, found))))
