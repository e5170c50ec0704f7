"""Tables on terminals of every width: no name, no number and no title is cut or broken."""

import io
import re

import pytest
from rich.console import Console

from legato.cli import output

TITLE = "resnet-v1-50 on 16 workers (ring); no plan can be faster than 1.48 ns"
ROWS = [
    {"fabric": "multicast+aggregation", "iteration_s": 0.171, "overlap": 1.0, "utilization": 0.6, "simulate_s": 0.02},
    {"fabric": "ring", "iteration_s": 0.181, "overlap": 0.6, "utilization": 0.5, "simulate_s": 0.01},
]


@pytest.mark.parametrize("width", [20, 60, 80, 120])
def test_a_terminal_shows_every_word_whole(monkeypatch, width):
    out = io.StringIO()
    monkeypatch.setattr(output, "_console", lambda stderr: Console(file=out, width=width, force_terminal=True))
    output.print_rows(TITLE, ROWS)
    lines = re.sub(r"\x1b\[[\d;]*m", "", out.getvalue()).splitlines()
    assert lines[0] == TITLE
    assert [line for line in lines if "multicast+aggregation" in line and "171 ms" in line]


def test_a_pipe_gets_plain_text_of_any_width(capfd):
    output.print_rows(TITLE, [{**ROWS[0], "fabric": "f" * 300}])
    said = capfd.readouterr().out
    assert "f" * 300 in said and "\x1b" not in said and "…" not in said


@pytest.mark.parametrize(("gap", "text"), [(-1e-9, "+0.0%"), (4e-4, "+0.0%"), (0.026, "+2.6%"), (-0.02, "-2.0%")])
def test_a_gap_is_never_minus_nothing(gap, text):
    assert output.format_gap(gap) == text
