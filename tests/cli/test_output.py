"""Tables on terminals of every width: no name, no number and no title is cut or broken."""

import io
import re
import threading
import time

import pytest
from support import PATIENCE_S

from legato.cli import output

TITLE = "resnet-v1-50 on 16 workers (ring); no plan can be faster than 1.48 ns"
ROWS = [
    {"fabric": "multicast+aggregation", "iteration_s": 0.171, "overlap": 1.0, "utilization": 0.6, "simulate_s": 0.02},
    {"fabric": "ring", "iteration_s": 0.181, "overlap": 0.6, "utilization": 0.5, "simulate_s": 0.01},
]


def printed(monkeypatch, width, rows, **options):
    """The lines that a terminal of this width gets."""
    out = io.StringIO()
    monkeypatch.setattr(output, "_console", lambda stderr: output._Console(file=out, width=width, force_terminal=True))
    output.print_rows(TITLE, rows, **options)
    return re.sub(r"\x1b\[[\d;]*m", "", out.getvalue()).splitlines()


@pytest.mark.parametrize("width", [20, 60, 80, 120])
def test_a_terminal_shows_every_word_whole(monkeypatch, width):
    lines = printed(monkeypatch, width, ROWS)
    assert lines[0] == TITLE
    for cell in ("171 ms", "1.00", "60.0%", "20 ms"):
        assert [line for line in lines if "multicast+aggregation" in line and cell in line], cell


@pytest.mark.parametrize("width", [40, 60])
def test_no_line_of_a_table_is_wider_than_the_terminal(monkeypatch, width):
    title, *lines = printed(monkeypatch, width, ROWS)
    assert title == TITLE and max(map(len, lines)) <= width
    assert sum("fabric" in line for line in lines) == (2 if width == 60 else 4)


def test_what_is_measured_and_what_is_predicted_stands_in_the_heads(monkeypatch):
    rows = [{"scheduler": "ddp", "iteration_s": 1.0, "measured_s": 1.1, "speedup_over_ddp": 1.0, "gap": 0.1}]
    heads = printed(monkeypatch, 200, rows)[1:4]
    assert re.findall(r"\w+", heads[1]) == ["measured", "predicted"]
    assert re.findall(r"\w+ ?\w+", heads[2]) == ["scheduler", "predicted", "measured", "over ddp", "above bound"]
    rows = [{"scheduler": "tac", "measured_s": 1.1, "predicted_s": 1.0, "overlap": 0.5}]
    assert re.findall(r"\w+", printed(monkeypatch, 200, rows, by="measured_s")[2]) == [
        "measured"
    ]  # TicTac's overlap of a real run


def test_a_pipe_gets_plain_text_of_any_width(capfd):
    output.print_rows(TITLE, [{**ROWS[0], "fabric": "f" * 300}])
    said = capfd.readouterr().out
    assert "f" * 300 in said and "\x1b" not in said and "…" not in said


def test_a_gap_of_nothing_has_no_sign(monkeypatch):
    rows = [{"scheduler": "ddp", "iteration_s": 1.0, "gap": gap} for gap in (-1e-9, 4e-4, 0.026, -0.02)]
    assert re.findall(r"\S+%", "\n".join(printed(monkeypatch, 200, rows))) == ["0.0%", "0.0%", "+2.6%", "-2.0%"]


@pytest.mark.parametrize("width", [80, 200])
def test_names_cannot_control_the_terminal_or_the_style(monkeypatch, width):
    out = io.StringIO()
    monkeypatch.setattr(output, "_console", lambda stderr: output._Console(file=out, width=width, force_terminal=True))
    name = "a\x1b]0;b\x07[/bold]\r\x9b31m:smile:"
    output.print_rows(name, [{**ROWS[0], "fabric": name}])
    output.note(name)
    output.say(name)
    shown = "a\\u001b]0;b\\u0007[/bold]\\r\\u009b31m:smile:"
    styles = re.sub(r"\x1b\[[\d;]*m", "", out.getvalue())
    assert styles.count(shown) >= 4 and styles.replace("\n", "").isprintable()


def test_a_pipe_hears_every_few_seconds_where_the_work_is(monkeypatch, capsys):
    monkeypatch.setattr(output, "_EVERY_S", 0.02)
    threads = {*threading.enumerate()}
    with output.stages(["measuring", "planning"]) as advance:
        advance("measuring", 3, 20)
        wait_for_line(capsys, r"measuring: 3 of 20 \(.+\)")
        advance("planning", 0, 0)
        wait_for_line(capsys, r"planning \(.+\)")
    assert {*threading.enumerate()} <= threads


def wait_for_line(capsys, pattern):
    said, end = "", time.monotonic() + PATIENCE_S
    while not re.search(pattern, said):
        assert time.monotonic() < end
        time.sleep(0.01)
        said += capsys.readouterr().err
