"""Arrows of the Chrome trace: gradient to message, message to the op that waited."""

import json

from support.report_samples import cnn, timelines

from legato.core.timeline import Span, Timeline
from legato.core.workload import Op, Tensor, Workload
from legato.reports.perfetto import flows, to_perfetto

WORKLOAD = Workload(
    "w",
    (
        Op("f0", "forward", 1.0),
        Op("f1", "forward", 1.0, (0,)),
        Op("b1", "backward", 1.0, (1,)),
        Op("b0", "backward", 1.0, (2,)),
    ),
    (Tensor("t1", 4, 2, (1,)), Tensor("t0", 4, 3, (0,))),
)
SPANS = {
    name: Span(0, "network" if kind == "message" else "compute", name, start, end, kind)
    for name, start, end, kind in (
        ("b1", 0.0, 1.0, "backward"),
        ("b0", 1.0, 2.0, "backward"),
        ("t1", 1.0, 2.5, "message"),
        ("t0", 2.5, 4.0, "message"),
        ("f0", 4.0, 5.0, "forward"),
        ("f1", 5.0, 6.0, "forward"),
    )
}
HAND = Timeline("hand", "predicted", 6.0, tuple(SPANS.values()))


def named(found):
    return {(start.name, end.name) for start, end in found}


def test_by_hand():
    """f0 stood idle for t0; f1 waited for nothing, as t1 was in long before."""
    assert named(flows(HAND)) == {("t0", "f0")}
    assert named(flows(HAND, WORKLOAD)) == {("t0", "f0"), ("b1", "t1"), ("b0", "t0")}


def test_messages_of_several_tensors_go_by_the_first():
    spans = (SPANS["b1"], SPANS["b0"], Span(0, "network", "t1 +1", 2.0, 4.0, "message"), SPANS["f0"], SPANS["f1"])
    assert named(flows(Timeline("m", "predicted", 6.0, spans), WORKLOAD)) == {("b1", "t1 +1"), ("t1 +1", "f0")}


def test_in_the_trace_every_arrow_has_two_ends_inside_its_spans():
    job = cnn(20)
    found = json.loads(to_perfetto(timelines(job), job))["traceEvents"]
    spans = {}
    for event in found:
        if event["ph"] == "X":
            spans.setdefault((event["pid"], event["tid"]), []).append(event)
    starts = {event["id"]: event for event in found if event["ph"] == "s"}
    ends = {event["id"]: event for event in found if event["ph"] == "f"}
    assert starts.keys() == ends.keys() and len(starts) >= 40
    kinds = set()
    for key, start in starts.items():
        end = ends[key]
        source, target = (
            next(s for s in spans[e["pid"], e["tid"]] if s["ts"] <= e["ts"] <= s["ts"] + s["dur"]) for e in (start, end)
        )
        kinds.add((source["cat"], target["cat"]))
        assert start["ts"] < end["ts"]
    assert {("backward", "message"), ("message", "optimizer")} == kinds  # in these, the optimizer waits
