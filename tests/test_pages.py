"""`legato.report`, `legato.sweep` and `legato.compare`: in Python as on the command line, flat rows, and refusals."""

import re

import pytest
from support import kineto_samples as samples
from support.command import run

import legato
from legato.core.errors import InputError

JOB = legato.Workload(
    "toy",
    (legato.Op("f", "forward", 0.01), legato.Op("b", "backward", 0.02, (0,))),
    (legato.Tensor("w", 4_000_000, 1, (0,)), legato.Tensor("v", 1_000_000, 1, (0,))),
)
CLUSTER = legato.Cluster.derive(4, 1e9, 1e-5, collectives=["ring"])
WHOLE = legato.job("llama-3-8b", data=16)


def sweep(what, **given):
    return legato.sweep(what, fidelity="formulas", jobs=1, **given)


@pytest.fixture
def traces(tmp_path):
    (tmp_path / "traces").mkdir()
    (tmp_path / "traces" / "rank.json").write_text(samples.ahead().text())
    return tmp_path / "traces"


def test_a_page_of_files_is_that_of_their_values(tmp_path, capsys):
    timeline = legato.simulate(JOB, legato.plan(JOB, CLUSTER), CLUSTER)
    paths = [tmp_path / f"{k}.json" for k in range(2)]
    for path, value in zip(paths, (JOB, timeline), strict=True):
        legato.write(path, value)
    assert run(capsys, "report", *paths, "-o", tmp_path / "files.html")[0] == 0
    legato.report(JOB, timeline, path=tmp_path / "values.html")
    assert (tmp_path / "files.html").read_text() == (tmp_path / "values.html").read_text()


def test_everything_that_is_returned_has_a_section(tmp_path, traces):
    values = [
        sweep(JOB, workers=[2, 4]),
        sweep(WHOLE, bandwidth_bps=[1e11, 4e11]),
        legato.compare(JOB, CLUSTER, ["ddp", "fifo"]),
        legato.predict(WHOLE),
        legato.layouts("llama-3-8b", gpus=8, batch=8, number=2),
        legato.advise(traces),
    ]
    legato.report(*values, path=tmp_path / "all.html")
    page = (tmp_path / "all.html").read_text()
    for said in ("fifo", "The step on each network", "The fastest layouts", "computing", "400 Gbit/s"):
        assert said in page
    assert len(re.findall(r"<section", page)) >= 6


def test_advice_is_what_the_command_prints(capsys, traces):
    status, out, err = run(capsys, "advise", traces)
    verdict = legato.advise(traces)
    assert status == 0, err
    printed = re.sub(r"[\s━┃│┏┓┡┩└┘┴┬┼╇┳─]+", " ", out)
    for line in str(verdict).splitlines():
        if not line.startswith(("missing:", "assumed:")):
            assert " ".join(line.split()) in printed
    assert verdict._repr_html_().count("<table") == out.count("┏━")


def test_rows_are_flat():
    pandas = pytest.importorskip("pandas")
    for found in (
        sweep(JOB, workers=[2, 4], scheduler=["ddp", "fifo"]),
        sweep([WHOLE, WHOLE], bandwidth_bps=[1e11, 4e11]),
        legato.compare(JOB, CLUSTER, ["ddp", "fifo"]),
    ):
        frame = pandas.DataFrame(found.rows)
        assert len(frame) == len(found) and not any(isinstance(v, (dict, list)) for v in frame.iloc[0])
    assert {row.job for row in sweep([WHOLE, WHOLE], bandwidth_bps=1e11)} == {"llama-3-8b 1", "llama-3-8b 2"}


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"bandwith_bps": 1e9}, "unknown axis 'bandwith_bps'; did you mean 'bandwidth_bps'"),
        ({"bandwidth_bps": "10Gbit"}, "bandwidth_bps: '10Gbit' (expected a number)"),
        ({"workers": [4, 8.0]}, "workers: 8.0 (expected a whole number)"),
        ({"workers": []}, "workers: empty (expected at least one)"),
        ({"scheduler": "dpd"}, "unknown scheduler 'dpd'; did you mean 'ddp'"),
    ],
)
def test_a_sweep_of_what_cannot_be(given, said):
    with pytest.raises(InputError, match=re.escape(said)):
        sweep(JOB, **given)


def test_whole_jobs_have_axes_of_their_own():
    with pytest.raises(InputError, match="unknown axis 'racks'"):
        sweep(WHOLE, racks=2)
    with pytest.raises(InputError, match="unknown axis 'fabric'"):
        sweep(WHOLE, fabric="tree")
    with pytest.raises(InputError, match="only one kind"):
        legato.sweep([WHOLE, JOB])


def test_nothing_is_drawn_of_nothing(tmp_path):
    for values in ((), (3,), (CLUSTER,)):
        with pytest.raises(InputError, match=r"\(expected "):
            legato.report(*values, path=tmp_path / "page.html")


def test_the_page_of_layouts_is_that_of_the_command(tmp_path, capsys):
    """The fastest of these layouts is near the limit of the memory; what is asked of machines is of one that fits."""
    found = legato.layouts("llama-3-8b", gpus=16, batch=32, number=3)
    assert found.first != found.best[0]
    ours, pages = ["layouts", "llama-3-8b", "--gpus", 16, "--batch", 32, "--number", 3], [tmp_path / "a.html"]
    assert run(capsys, *ours, "--report", pages[0])[0] == 0
    pages.append(tmp_path / "b.html")
    legato.report(found, path=pages[1])
    command, python = (page.read_text() for page in pages)
    assert command == python
