"""Every refusal of a trace names a file, whichever reader refuses it and why."""

import pytest
from support import kineto_samples as samples
from support.command import run


@pytest.fixture
def trace(tmp_path):
    path = tmp_path / "trace.json"
    path.write_text(samples.ahead().text())
    return path


@pytest.fixture
def sends(tmp_path):
    path = tmp_path / "trace.csv"
    path.write_text("time_s,parameter,size_bytes,source,destination\n1,a,4,worker0,ps0\n2,a,4,worker0,ps0\n")
    return path


def refused(capsys, path, *arguments):
    status, _, err = run(capsys, *arguments)
    assert status == 2 and str(path) in err.splitlines()[-1], err
    return err


@pytest.mark.parametrize("option", [["--rank", "7"], ["--step", "99"]])
@pytest.mark.parametrize("command", [["advise"], ["import", "kineto", "-o", "w.json"]])
def test_options_that_a_trace_does_not_have(trace, capsys, command, option):
    refused(capsys, trace, *command, trace, *option)


def test_traces_of_jobs_of_other_sizes(tmp_path, trace, capsys):
    other = tmp_path / "four.json"
    other.write_text(samples.ahead(rank=1, workers=4).text())
    err = refused(capsys, other, "import", "kineto", trace, other, "-o", "w.json")
    assert str(trace) in err and "of jobs with 2 and 4 ranks" in err


def test_one_kind_of_trace_without_the_other(trace, tmp_path, capsys):
    graph = tmp_path / "graph.json"
    graph.write_text('{"schema": "1", "nodes": []}')
    refused(capsys, graph, "import", "execution-trace", graph, "-o", "w.json")
    refused(capsys, trace, "import", "execution-trace", trace, trace, graph, "-o", "w.json")


def test_send_traces(sends, capsys):
    for options in ([], ["--after", "b"], ["--drop", "a"], ["--worker", "worker7"]):
        refused(capsys, sends, "import", "send-trace", sends, "-o", "w.json", *options)


def test_a_step_that_makes_no_workload_or_network(tmp_path, capsys):
    path = tmp_path / "bare.json"
    path.write_text(samples.ahead(shapes=False, sized=False).text())
    refused(capsys, path, "import", "kineto", path, "-o", "w.json")
    refused(capsys, path, "import", "kineto", path, "-o", "w.json", "--cluster", "c.json")


def test_what_legato_has_written_into_a_folder_is_left_out(tmp_path, trace, capsys):
    _, expected, _ = run(capsys, "advise", trace)
    run(capsys, "import", "kineto", trace, "-o", tmp_path / "w.json", "--timeline", tmp_path / "measured.json")
    run(capsys, "trace", tmp_path / "measured.json", "-o", tmp_path / "perfetto.json")
    status, out, err = run(capsys, "advise", tmp_path)
    assert status == 0 and out == expected
    assert f"left out, because legato has written it: {tmp_path / 'measured.json'} and 2 more" in err
    trace.unlink()
    refused(capsys, tmp_path, "advise", tmp_path)
    refused(capsys, tmp_path / "w.json", "advise", tmp_path / "w.json")
