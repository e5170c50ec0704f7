"""The five-column send trace: section 5 of the Network Operator Edition, and what it must not accept."""

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.strategies import examples

from legato import zoo
from legato.core.errors import FileError, InputError
from legato.lab.send_trace import export_send_trace, import_send_trace, read_send_trace

HEADER = "time_s,parameter,size_bytes,source,destination\n"
AGGREGATION = """\
9.5,gradients/conv1/bn/moving_mean,8,worker0,ps0
10.0,forward_done,4,worker0,ps0
10.5,gradients/fc/weights,4000,worker0,ps0
10.6,aux_logits/weights,40,worker0,ps0
11.0,gradients/conv2/weights,800,worker0,ps1
11.0,gradients/conv2/moving_variance,8,worker0,ps1
12.5,gradients/conv1/weights,200,worker0,ps0
10.6,gradients/fc/weights,4000,worker1,ps0
12.7,gradients/conv1/weights,200,worker1,ps0
"""
DISTRIBUTION = """\
0.0,conv1/weights/read,200,ps0,worker0
0.1,fc/weights/read,4000,ps0,worker0
0.2,conv2/weights/read,800,ps1,worker0
"""


@pytest.fixture
def trace(tmp_path):
    path = tmp_path / "vgg.csv"
    path.write_text(HEADER + AGGREGATION + DISTRIBUTION)
    return path


def test_the_filters_of_section_5_leave_the_gradients(trace):
    found = import_send_trace([trace], after="forward_done", drop=["aux_logits"], forward_s=0.3)
    job = found.workload
    assert [(t.name, t.nbytes) for t in job.tensors] == [
        ("fc/weights", 4000),
        ("conv2/weights", 800),
        ("conv1/weights", 200),
    ]
    assert [job.ops[i].duration_s for i in job.phase_ops("backward")] == pytest.approx([0, 0.5, 1.5])
    # The distribution trace gives the order in which the forward pass reads, which is not the reverse.
    assert [job.ops[t.readers[0]].name for t in job.tensors] == [f"{t.name}/forward" for t in job.tensors]
    assert [job.ops[i].name for i in job.phase_ops("forward")][1] == "fc/weights/forward"
    assert sum(job.ops[i].duration_s for i in job.phase_ops("forward")) == pytest.approx(0.3)


def test_another_worker_and_no_distribution_trace(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text(HEADER + AGGREGATION)
    found = import_send_trace([path], worker="worker1")
    assert [t.name for t in found.workload.tensors] == ["fc/weights", "conv1/weights"]
    assert found.workload.compute_s == pytest.approx(2.1 * 1.5)
    assert {"the distribution trace", "the forward pass (--forward)"} <= set(found.notes.missing)


@pytest.mark.parametrize("model", ["vgg-16", "inception-v3"])
def test_what_is_exported_is_imported(tmp_path, model):
    job = zoo.workload(model)
    path = tmp_path / "t.csv"
    path.write_text(export_send_trace(job, workers=3, servers=2))
    sends = read_send_trace(path)
    assert (
        sum(s.nbytes for s in sends if s.aggregates) == sum(s.nbytes for s in sends if s.distributes) == 3 * job.nbytes
    )
    assert {s.destination for s in sends if s.aggregates} == {"ps0", "ps1"}
    back = import_send_trace([path], worker="worker2").workload
    assert {(t.name, t.nbytes) for t in back.tensors} == {(t.name, t.nbytes) for t in job.tensors}
    ready = dict[int, float]()
    clock = 0.0
    for i in job.phase_ops("backward"):
        clock += job.ops[i].duration_s
        ready[i] = clock
    moments = sorted(ready[t.ready_after] for t in job.tensors)
    gaps = [0.0, *(b - a for a, b in itertools.pairwise(moments))]
    assert [back.ops[i].duration_s for i in back.phase_ops("backward")] == pytest.approx(gaps, abs=1e-12)


@pytest.mark.parametrize(
    "text, says",
    [
        ("", "line 1: nothing"),
        ("a,b\n", "line 1: a,b"),
        (HEADER, "no sends from a worker"),
        (HEADER + "1,a,2,worker0\n", "line 2: 4 columns"),
        (HEADER + "x,a,2,worker0,ps0\n", "line 2: time_s: x"),
        (HEADER + "nan,a,2,worker0,ps0\n", "time_s: nan"),
        (HEADER + "1e99,a,2,worker0,ps0\n", "time_s: 1e99"),
        (HEADER + "1,a,-2,worker0,ps0\n", "size_bytes: -2"),
        (HEADER + "1,a,2.5,worker0,ps0\n", "size_bytes: 2.5"),
        (HEADER + f"1,a,{'9' * 5000},worker0,ps0\n", "size_bytes: 999"),
        (HEADER + "1,,2,worker0,ps0\n", "parameter: empty"),
        (HEADER + "1,a,2,worker0,ps0\n2,a,2,worker0,ps0\n", "'a' is sent twice"),
        (HEADER + "1,a/moving_mean,2,worker0,ps0\n", "no gradients are left"),
        (HEADER + '1,"a', "CSV|columns"),
        (HEADER + "1," + "a" * 200_000 + ",2,worker0,ps0\n", "field larger"),
    ],
)
def test_a_wrong_file_gets_one_line(tmp_path, text, says):
    path = tmp_path / "t.csv"
    path.write_text(text)
    with pytest.raises(InputError, match=says) as error:
        import_send_trace([path])
    assert str(error.value).isprintable() and len(str(error.value)) < 400


def test_wrong_options_and_bytes(tmp_path, trace):
    for options, says in (
        ({"worker": "worker9"}, "has worker0, worker1"),
        ({"after": "nothing"}, "no such operation"),
        ({"drop": ["("]}, "not a regular expression"),
    ):
        with pytest.raises(InputError, match=says):
            import_send_trace([trace], **options)
    trace.write_bytes(b"\xff\xfe")
    with pytest.raises(FileError, match="not UTF-8"):
        import_send_trace([trace])
    with pytest.raises(FileError, match="cannot read"):
        import_send_trace([tmp_path / "none.csv"])


@examples(50)
@given(st.text(max_size=200))
def test_any_text_is_refused_or_read(tmp_path_factory, text):
    path = tmp_path_factory.mktemp("t") / "t.csv"
    path.write_text(HEADER + text, encoding="utf-8", errors="replace", newline="")
    try:
        sends = read_send_trace(path)
    except FileError as error:
        assert str(error).isprintable()
    else:
        assert all(math.isfinite(s.time_s) and s.nbytes > 0 for s in sends)
