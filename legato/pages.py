"""Write pages that show workloads, plans, timelines and results. Values about the same job are drawn together."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

from msgspec.structs import replace

from legato.core.cluster import Cluster
from legato.core.errors import InputError
from legato.core.measurement import Measurement
from legato.core.plan import Plan
from legato.core.results import Results
from legato.core.table import Column, Table
from legato.core.text import count, percent, shorten
from legato.core.timeline import Timeline
from legato.core.workload import Workload
from legato.reports.html import write_report
from legato.reports.model import ModelReport, Report, SchedulerRow, SweepRow, are_jobs
from legato.schedule.compare import SAME, Candidate, best, better_buckets, compare, stock_buckets
from legato.whole_jobs.layouts import Layouts
from legato.whole_jobs.step import Step
from legato.whole_jobs.told import faster, report_of

__all__ = ["Given", "paired", "report", "report_of_nouns"]

Noun = TypeVar("Noun", Workload, Cluster, Timeline, Plan, Measurement)
_NOUNS = (Workload, Cluster, Timeline, Plan, Measurement)


def report(*values: Any, path: str | os.PathLike[str]) -> None:
    """Write a self-contained page (.html) that shows the values, or only its figures (.svg, .pdf).

    Workloads, clusters, plans, timelines and measurements share one section, as in `legato report`. Each step of a
    whole job, each layout, and each result of `legato.sweep`, `legato.compare` and `legato.advise` has its own section.
    Raises `InputError` on any other value, and `FileError` if the file cannot be written.
    """
    nouns = Given([(f"value {k + 1}", value) for k, value in enumerate(values) if isinstance(value, _NOUNS)])
    models, sweep = [report_of_nouns(nouns)] if nouns.found else [], []
    for value in values:
        if isinstance(value, Results) and value and isinstance(value[0], SweepRow):
            sweep += value
        elif not isinstance(value, _NOUNS):
            models += _sections(value)
    write_report(path, Report(tuple(models), sweep=tuple(sweep)))


def _sections(value: Any) -> Sequence[ModelReport]:
    if isinstance(value, Layouts):
        return [report_of(value.first, value, faster(value.first))]
    if isinstance(value, Step):
        return [report_of(value, None, faster(value))]
    if isinstance(value, Results) and value and isinstance(value[0], Candidate):
        return [
            ModelReport(
                value[0].timeline.job or "schedulers",
                rows=tuple(SchedulerRow(**one.columns) for one in value),
                timelines=tuple(one.timeline for one in value),
                plans=tuple(one.plan for one in value),
            )
        ]
    if callable(made := getattr(value, "sections", None)):
        return made()
    raise InputError(
        f"{type(value).__name__}: nothing to draw (expected a timeline, a workload, or what legato returns)"
    )


def report_of_nouns(found: Given, say: Callable[[str], object] = lambda _: None) -> ModelReport:
    """Return the section that shows the given values.

    If there are a workload and a cluster, but no timeline and no measurement, plans are made, and `say` gets a note
    about the plans.
    """
    timelines, measured = found.timelines(), found.one(Measurement)
    workload, cluster = found.one(Workload), found.one(Cluster)
    if not timelines and workload is None and measured is None:
        raise InputError("nothing to draw (expected a timeline, or a workload)")
    jobs = [workload.name] if workload else [measured.job] if measured else [t.job for t in timelines if t.job]
    model = ModelReport(
        ", ".join(dict.fromkeys(jobs)) or timelines[0].name,
        workload,
        cluster,
        timelines=paired(timelines, [plan.scheduler for plan in measured.plans] if measured else ()),
        plans=tuple(found.of(Plan)),
        measured=measured,
        told=_jobs(timelines),
    )
    if workload is not None and cluster is not None and not timelines and measured is None:
        model = _planned(model, workload, cluster, say)
    return model


class Given(NamedTuple):
    """The values that a section shows, with the names of their files, in the given order."""

    found: Sequence[tuple[str, Any]]

    def of(self, kind: type[Noun]) -> list[Noun]:
        return [value for _, value in self.found if isinstance(value, kind)]

    def one(self, kind: type[Noun]) -> Noun | None:
        """Return the only value of a kind, or None. Raises `InputError` if there are several."""
        paths = [path for path, value in self.found if isinstance(value, kind)]
        if len(paths) > 1:
            raise InputError(f"{paths[0]} and {paths[1]}: two {kind.__name__.lower()}s (expected one at most)")
        return next(iter(self.of(kind)), None)

    def timelines(self) -> tuple[Timeline, ...]:
        """Return all timelines; a timeline that contains its baseline comes directly after this baseline.

        If several timelines have the same name and source, the names of their files are added.
        """
        given = [(path, value) for path, value in self.found if isinstance(value, Timeline)]
        found = [
            (path, one)
            for path, value in given
            for line in (value.baseline, value)
            if line is not None
            for one in line.drawn()
        ]
        times = Counter((value.name, value.source) for _, value in found)
        return tuple(
            _renamed(value, f"{value.name} ({path})") if times[value.name, value.source] > 1 else value
            for path, value in found
        )


def _renamed(timeline: Timeline, name: str) -> Timeline:
    return replace(timeline, name=name, job=name if timeline.job == timeline.name else timeline.job)


def _jobs(timelines: Sequence[Timeline]) -> tuple[Table, ...]:
    """Return a table of jobs on one network, or of the GPUs of one job; no table for timelines of plans."""
    whole = any(t.whole for t in timelines)
    columns = [
        Column("GPU" if whole else "job", lambda t: shorten(t.name, 60)),
        Column("iteration", "iteration_s"),
        Column("computing", "computation_s"),
        Column("communicating", "communication_s"),
        Column("exposed", "exposed_comm_s"),
    ]
    title = f"{count(len(timelines), 'GPU')} of one job" if whole else f"{count(len(timelines), 'job')} on one network"
    return (Table(f"{title}, predicted", timelines, columns),) if are_jobs(timelines) else ()


def paired(timelines: Sequence[Timeline], first: Sequence[str] = ()) -> tuple[Timeline, ...]:
    """Return the timelines sorted by name (those in `first` come first), each prediction before its measurement."""
    names = list(dict.fromkeys([*first, *(timeline.name for timeline in timelines)]))
    return tuple(sorted(timelines, key=lambda timeline: (names.index(timeline.name), timeline.source == "measured")))


def _planned(model: ModelReport, workload: Workload, cluster: Cluster, say: Callable[[str], object]) -> ModelReport:
    """Return the report with plans made for its workload, and the recommendation that follows from the predictions."""
    ddp, merged, ours = found = compare(workload, cluster, ["ddp", "merge-optimal", "legato"])
    chosen = best(found)
    if chosen is ddp:
        advice = f"Stay with DDP: no plan is predicted to be more than {percent(SAME)} faster."
    else:
        buckets, stock_s = stock_buckets(merged, workload, cluster)
        caps = ", ".join(map(repr, better_buckets(ddp.iteration_s, stock_s, buckets)))
        speedup, stock = ddp.iteration_s / chosen.iteration_s, ddp.iteration_s / stock_s
        with_stock = f"; or with stock DDP: bucket_cap_mb_list=[{caps}]: {stock:.2f}x" if caps else ""
        advice = f"Use this plan: {chosen.plan.scheduler}, {speedup:.2f}x (predicted, over DDP){with_stock}."
    made = "planned for this page: ddp, merge-optimal and legato"
    say(made)
    return replace(
        model,
        rows=tuple(SchedulerRow(**candidate.columns) for candidate in found),
        timelines=tuple(candidate.timeline for candidate in (ddp, ours)),
        plans=(*model.plans, ddp.plan, ours.plan),
        advice=f"{advice} ({made[0].upper()}{made[1:]}.)",
    )
