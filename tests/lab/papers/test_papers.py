"""What the reproductions reach, as ratios of the published values: a drift of models or simulator fails here."""

from functools import cache

import pytest

from legato.core.errors import InputError
from legato.lab.papers import PAPERS, Cell, Figure, paper, select
from legato.lab.papers.pages import write_page


@cache
def cells(name, label):
    return PAPERS[name].parts[label]().cells


def ratios(name, label, *, row="", column="", without=()):
    """The ratios of the cells whose row and column contain these words."""
    found = {
        (cell.row, cell.column): cell.ratio
        for cell in cells(name, label)
        if row in cell.row and column in cell.column
        if not any(word in f"{cell.row}, {cell.column}" for word in without)
    }
    assert found, f"no cell of {label} has {row!r} and {column!r}"
    return found


def within(found, low, high):
    return {key: ratio for key, ratio in found.items() if not low <= ratio <= high} == {}


NOE = "network-operator-edition"


@pytest.mark.parametrize("mode", ["literal", "fitted"])
def test_noe_table_1(mode):
    """Within 10%, Inception-v3 on 8 servers 25%; VGG-16 on 8 servers only in a random order."""
    found = ratios(NOE, "Table 1", column=mode)
    found.pop(("VGG-16 Sim", f"8 PS, {mode} (s)"))
    assert 0.75 <= found.pop(("Inception-v3 Sim", f"8 PS, {mode} (s)")) <= 1.25
    assert within(found, 0.9, 1.1)
    assert within(ratios(NOE, "Table 1", column="random"), 0.9, 1.1)


def test_noe_table_2():
    """Sizes within 1% (Inception-v3's 0.715 Gb fits no variant), FLOPs within 11%."""
    assert within(ratios(NOE, "Table 2", column="size", without=["Inception"]), 0.99, 1.01)
    assert within(ratios(NOE, "Table 2", column="FLOPs"), 0.99, 1.11)


def test_noe_table_4():
    """Single mechanisms within 15% literal and 10% fitted; both together within 10% fitted; VGG-16 within 2%."""
    both = ["multicast+aggregation"]
    assert within(ratios(NOE, "Table 4", column="literal", without=both), 0.85, 1.15)
    assert within(ratios(NOE, "Table 4", column="fitted"), 0.9, 1.1)
    assert within(ratios(NOE, "Table 4", row="VGG-16"), 0.98, 1.02)


def test_noe_table_6():
    assert within(ratios(NOE, "Table 6", row="VGG-16"), 0.98, 1.02)
    assert within(ratios(NOE, "Table 6", column="fitted"), 0.9, 1.1)


def test_noe_table_7():
    """To the printed digits, of which small ones have one; tests/zoo compares them digit by digit."""
    assert within(ratios(NOE, "Table 7", column="Max"), 0.99, 1.01)
    assert within(ratios(NOE, "Table 7", column="Min"), 0.99, 1.2)


def test_noe_table_8():
    assert within(ratios(NOE, "Table 8", column="fitted"), 0.9, 1.1)
    assert within(ratios(NOE, "Table 8", row="VGG-16", column="literal"), 0.97, 1.03)


@pytest.mark.slow
def test_noe_table_9():
    """Within 10% but for Inception-v3 without the barrier, which only the literal time explains."""
    odd = "Inception-v3, multiagg no barrier"
    assert within(ratios(NOE, "Table 9", column="fitted", without=[odd]), 0.9, 1.1)
    assert within(ratios(NOE, "Table 9", row="Inception", column="no barrier, literal"), 0.9, 1.1)


@pytest.mark.slow
def test_noe_table_10():
    assert within(ratios(NOE, "Table 10", row="VGG-16"), 0.98, 1.02)
    assert within(ratios(NOE, "Table 10", column="fitted"), 0.85, 1.15)


def test_noe_toy_is_exact():
    assert within(ratios(NOE, "Fig. 2"), 1 - 1e-9, 1 + 1e-9)


def test_noe_text():
    assert within(ratios(NOE, "Text", row="8.2.1"), 0.99, 1.01)
    assert within(ratios(NOE, "Text", row="9.1"), 0.999, 1.001)
    for section in ("8.1.3", "8.1.4 all", "8.4"):
        assert within(ratios(NOE, "Text", row=section), 1, 1)


@pytest.mark.slow
def test_noe_faster_computation():
    """Section 8.6: Resnet-200 at 3x, 10x by butterfly and 19.5x by multicast with aggregation."""
    assert within(ratios(NOE, "Fig. 12"), 0.95, 1.05)


@pytest.mark.parametrize("label", ["Fig. 3", "Fig. 6", "Fig. 7", "Fig. 11"])
def test_noe_claims_hold(label):
    assert within(ratios(NOE, label), 1, 1)


def test_mg_wfbp_network():
    assert within(ratios("mg-wfbp", "Table 2"), 1 - 1e-9, 1 + 1e-9)
    assert within(ratios("mg-wfbp", "Fig. 5", row="start-up"), 1 - 1e-9, 1 + 1e-9)


def test_mg_wfbp_speedups():
    """64 nodes within 8%, but ResNet-50 over WFBP 18%; 8 nodes over SyncEASGD within 10%."""
    odd = "ResNet-50 on 64 nodes, MG-WFBP over WFBP"
    assert within(ratios("mg-wfbp", "Fig. 9", column="over", row="64", without=[odd]), 0.92, 1.08)
    assert within(ratios("mg-wfbp", "Fig. 9", column="over WFBP"), 0.82, 1.08)
    for label in ("Fig. 6", "Fig. 7"):
        assert within(ratios("mg-wfbp", label, column="over SyncEASGD"), 0.9, 1.1)


@pytest.mark.parametrize("label", ["Fig. 6", "Fig. 7", "Fig. 8", "Fig. 9"])
def test_mg_wfbp_claims_hold(label):
    """The lines of WFBP and SyncEASGD cross; MG-WFBP is the fastest everywhere."""
    assert within(ratios("mg-wfbp", label, without=["over", "scaling efficiency"]), 1, 1)


def test_pace_table_2():
    assert within(ratios("pace", "Table 2"), 0.995, 1.005)


def test_pace_gains():
    """Over Horovod at the published bandwidths within 14%, but ResNet50 at 20 Gbps, where every cut costs."""
    assert within(ratios("pace", "Fig. 9", column="speed over Horovod", without=["ResNet50 at 20"]), 0.86, 1.14)
    assert within(ratios("pace", "Fig. 8", row="speed over Horovod"), 0.9, 1.1)
    assert within(ratios("pace", "Fig. 9", column="alike"), 1, 1)


def test_caramel_models_and_claims():
    assert within(ratios("caramel", "Section 6"), 0.999, 1.001)
    for label in ("Fig. 8", "Fig. 9", "Fig. 10"):
        assert within(ratios("caramel", label, without=["greatest"]), 1, 1)


def test_caramel_gains():
    """One constant for Horovod, from one utilization: the saving of network cost within 5%, the gains within 30%."""
    assert within(ratios("caramel", "Fig. 11", column="fitted"), 0.95, 1.1)
    assert within(ratios("caramel", "Fig. 10", column="saving"), 0.95, 1.05)
    assert within(ratios("caramel", "Fig. 8", column="greatest"), 0.7, 1)
    assert within(ratios("caramel", "Fig. 9", column="greatest"), 0.7, 1)


def test_tictac_table_1():
    assert within(ratios("tictac", "Table 1"), 0.9998, 1.0002)


@pytest.mark.slow
def test_tictac_gains():
    """Greatest gain and loss in training within 6%; inference gains more; larger graphs gain more; TIC is near TAC."""
    assert within(ratios("tictac", "Fig. 9", column="greatest", without=["inference"]), 0.94, 1.06)
    assert within(ratios("tictac", "Fig. 9", column="inference gains"), 1, 1)
    for label in ("Fig. 10", "Fig. 11", "Fig. 12", "Fig. 15"):
        assert within(ratios("tictac", label, without=["greatest"]), 1, 1)


@pytest.mark.slow
def test_tictac_regression():
    """R2 of 0.98 within 5%, percentiles within 8%, and TAC ahead of every random order."""
    assert within(ratios("tictac", "Fig. 13"), 0.92, 1.05)
    assert within(ratios("tictac", "Fig. 13", column="R2"), 0.95, 1.02)
    assert within(ratios("tictac", "Fig. 13", column="faster"), 1, 1)


def test_unknown_paper_is_named():
    with pytest.raises(InputError, match="did you mean 'mg-wfbp'"):
        paper("mgwfbp")


def test_select_by_table_and_figure():
    found = PAPERS["mg-wfbp"]
    assert select(found, table=2) == ["Table 2"]
    assert select(found, table=2, figure=9) == ["Table 2", "Fig. 9"]
    assert select(found, table=9) == []
    assert select(found) == list(found.parts)


def test_every_paper_says_what_is_left_out():
    assert set(PAPERS) == {"network-operator-edition", "mg-wfbp", "caramel", "tictac", "pace"}
    assert all(found.left_out and found.constants for found in PAPERS.values())


def test_ratio_of_an_unpublished_value_is_none():
    assert Cell("Fig. 1", "row", "column", None, 2.0).ratio is None


def test_page_holds_the_figures_and_loads_nothing(tmp_path):
    figure = Figure("Fig. 9", "a <title>", "x", "y", {"ours": ([1, 2], [3.0, 4.0])})
    write_page(tmp_path / "page.html", PAPERS["mg-wfbp"], [figure])
    text = (tmp_path / "page.html").read_text(encoding="utf-8")
    body = text.split("</head>")[1]
    assert "plotly-graph-div" in body and "Fig. 9: a " in body
    assert "<script src=" not in text and "https://cdn" not in body
