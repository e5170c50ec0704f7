"""`legato reproduce`: what it prints, what it draws, and how it refuses."""

import json

import pytest
from support.command import run

from legato.lab.papers import PAPERS


def test_json_has_a_row_a_cell(capsys):
    status, out, _ = run(capsys, "reproduce", "network-operator-edition", "--table", 7, "--json")
    rows = json.loads(out)
    assert status == 0 and len(rows) == 12
    for row in rows:
        assert list(row) == ["paper", "table", "row", "column", "published", "ours", "ratio"]
        assert (row["paper"], row["table"]) == ("network-operator-edition", "Table 7")
        assert row["ratio"] == pytest.approx(row["ours"] / row["published"])


def test_people_get_a_table_figures_and_what_is_left_out(capsys, tmp_path):
    status, out, err = run(capsys, "reproduce", "mg-wfbp", "-o", tmp_path / "figures")
    assert status == 0
    for words in ("Table 2", "published", "ratio", "WFBP ahead of SyncEASGD"):
        assert words in out
    for what in PAPERS["mg-wfbp"].left_out:
        assert what in err
    assert (tmp_path / "figures" / "mg-wfbp.html").stat().st_size > 1e6


def test_all_takes_a_table_of_every_paper_that_has_it(capsys):
    status, out, _ = run(capsys, "reproduce", "all", "--table", 2, "--json")
    assert status == 0
    assert {row["paper"] for row in json.loads(out)} == {"network-operator-edition", "mg-wfbp", "pace"}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("mgwfbp",), "did you mean 'mg-wfbp'"),
        (("mg-wfbp", "--table", 9), "no table 9 (expected one of Table 2"),
        (("mg-wfbp", "--figure", 0), "--figure"),
        (("mg-wfbp", "-o", "/dev/null/x"), "/dev/null/x"),
    ],
)
def test_wrong_input_gets_one_line(capsys, arguments, words):
    status, out, err = run(capsys, "reproduce", *arguments)
    assert (status, out) == (2, "")
    assert len(err.strip().splitlines()) == 1 and words in err
