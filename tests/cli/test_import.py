"""`legato import`, and `legato trace` to the same formats, as a user meets them."""

import json

import pytest
from support import kineto_samples as samples
from support.command import run

import legato


@pytest.fixture
def traces(tmp_path):
    paths = [tmp_path / f"rank{r}.json" for r in (0, 1)]
    for rank, path in enumerate(paths):
        path.write_text(samples.record(rank, late_us=100 * rank).text())
    return paths


def test_import_plan_and_report_what_was_measured(capsys, tmp_path, traces):
    w, t = tmp_path / "w.json", tmp_path / "t.json"
    status, out, _ = run(capsys, "import", "kineto", *traces, "-o", w, "--timeline", t, "--json")
    assert status == 0
    said = json.loads(out)
    assert said["nbytes"] == 16000 and said["num_tensors"] == 2 and len(said["ranks"]) == 2
    assert {"waiting_s", "host_overlap", "exposed_comm_s"} <= set(said["ranks"][0])
    assert "each op needs the one before it" in said["assumed"]
    status, out, _ = run(capsys, "plan", w, "--workers", 8, "--bandwidth", "10Gbit", "--scheduler", "all", "--json")
    assert status == 0 and all(row["iteration_s"] > 0 for row in json.loads(out))
    assert run(capsys, "report", t, "-o", tmp_path / "r.html")[0] == 0


def test_a_folder_stands_for_the_traces_in_it(capsys, tmp_path, traces):
    assert run(capsys, "import", "kineto", *traces, "-o", tmp_path / "files.txt")[0] == 0
    assert run(capsys, "import", "kineto", tmp_path, "-o", tmp_path / "folder.txt")[0] == 0
    assert (tmp_path / "files.txt").read_text() == (tmp_path / "folder.txt").read_text()


def test_it_says_what_is_missing_and_what_was_assumed(capsys, tmp_path, traces):
    status, _, err = run(capsys, "import", "kineto", traces[0], "-o", tmp_path / "w.json")
    assert status == 0 and "missing: the other ranks" in err and "assumed: no collective waits" in err


def test_a_plan_goes_out_as_chakra_and_comes_back(capsys, tmp_path, traces):
    w, p, t = (tmp_path / name for name in ("w.json", "p.json", "t.json"))
    run(capsys, "import", "kineto", *traces, "-o", w)
    run(capsys, "plan", w, "--scheduler", "fifo", "-o", p, "--timeline", t)
    status, _, _ = run(capsys, "trace", t, w, p, "--workers", 2, "-o", tmp_path / "j.et")
    assert status == 0 and sorted(f.name for f in tmp_path.glob("*.et")) == ["j.0.et", "j.1.et"]
    status, _, _ = run(capsys, "import", "chakra", *sorted(tmp_path.glob("*.et")), "-o", tmp_path / "back.json")
    before, after = (legato.read(f, legato.Workload) for f in (w, tmp_path / "back.json"))
    assert [(x.name, x.nbytes) for x in after.tensors] == [(x.name, x.nbytes) for x in before.tensors]


def test_a_workload_goes_out_as_sends_and_comes_back(capsys, tmp_path, traces):
    w, s = tmp_path / "w.json", tmp_path / "s.csv"
    run(capsys, "import", "kineto", *traces, "-o", w)
    assert run(capsys, "trace", w, "--workers", 2, "--servers", 2, "-o", s)[0] == 0
    status, out, _ = run(capsys, "import", "send-trace", s, "--forward", "3ms", "-o", tmp_path / "b.json", "--json")
    assert status == 0 and json.loads(out)["nbytes"] == 16000


@pytest.mark.parametrize(
    "arguments, says",
    [
        (["kinet", "T"], "did you mean 'kineto'"),
        (["kineto", "none.json"], "none.json: cannot read"),
        (["kineto", "T", "--idle", "maybe"], "--idle"),
        (["kineto", "T", "--forward", "1ms"], "--forward does not apply to kineto"),
        (["chakra", "T"], "Chakra trace"),
        (["chakra", "T", "--step", "1"], "--step does not apply to chakra"),
        (["send-trace", "T", "--rank", "1"], "--rank does not apply"),
        (["send-trace", "T"], "line 1"),
        (["execution-trace", "T"], "one of each per rank"),
    ],
)
def test_wrong_input_gets_one_line_and_no_file(capsys, tmp_path, traces, arguments, says):
    given = [str(traces[0]) if a == "T" else a for a in arguments]
    status, out, err = run(capsys, "import", *given, "-o", tmp_path / "w.json")
    lines = [line for line in err.splitlines() if line.strip()]
    assert status == 2 and out == "" and len(lines) == 1 and says in lines[0]
    assert not (tmp_path / "w.json").exists()


@pytest.mark.parametrize(
    "arguments, says",
    [
        (["-o", "x.json"], "no timelines"),
        (["-o", "x.et"], "needs one timeline"),
        (["-o", "x.csv"], "needs a workload"),
        (["-o", "x.json", "--servers", "2"], "--servers does not apply"),
    ],
)
def test_wrong_exports_get_one_line(capsys, arguments, says):
    status, _, err = run(capsys, "trace", *arguments)
    assert status == 2 and says in err
