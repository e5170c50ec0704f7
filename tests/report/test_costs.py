"""Which tensors cost the most time."""

import pytest
from support.report_samples import CLUSTER, cnn, timelines

from legato.core.timeline import Span, Timeline
from legato.report.costs import cost_sentence, costs
from legato.report.waits import waits
from legato.schedule import schedule
from legato.simulator.collective import simulate


def test_the_sentence_names_the_tensors_that_cost_most_of_the_idle_time():
    spans = [Span(0, "compute", "b", 0.0, 1.0, "backward")]
    for k, seconds in enumerate((0.55, 0.3, 0.15)):
        start = spans[-1].end_s
        spans.append(Span(0, "network", f"t{k}", start, start + seconds, "message"))
        spans.append(Span(0, "compute", f"f{k}", start + seconds, start + seconds + 0.1, "forward"))
    timeline = Timeline("x", "predicted", spans[-1].end_s, tuple(spans))
    assert cost_sentence(*costs(timeline)) == "These two tensors cost you 850 ms of 1 s idle: t0, t1."
    assert cost_sentence(*costs(timelines(cnn(50))[0])).startswith("This one message costs you ")


@pytest.mark.parametrize("name", ["ddp", "mg-wfbp", "legato", "fifo"])
def test_with_the_plan_the_cost_of_messages_is_that_of_their_tensors(name):
    job = cnn(30)
    plan = schedule(name, job, CLUSTER)
    timeline = simulate(job, plan, CLUSTER)
    found, tensors = costs(timeline, [plan])
    assert tensors and {wait.message for wait in found} <= {tensor.name for tensor in job.tensors} | {None}
    assert sum(w.seconds for w in found) == pytest.approx(sum(w.seconds for w in waits(timeline)))
    seconds = [wait.seconds for wait in found]
    assert seconds == sorted(seconds, reverse=True)


def test_the_plan_of_another_timeline_says_nothing():
    job = cnn(30)
    timeline = simulate(job, schedule("ddp", job, CLUSTER), CLUSTER)
    for other in (schedule("fifo", job, CLUSTER), schedule("ddp", job, CLUSTER, bucket_bytes=2**21)):
        assert costs(timeline, [other]) == (waits(timeline), False)
