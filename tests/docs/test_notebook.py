"""The tutorial for researchers is also a notebook: made from the page, and its cells run in order."""

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
from support import PATIENCE_S

import legato
from legato.zoo import workload

TUTORIALS = Path(__file__).resolve().parents[2] / "docs" / "tutorials"
NOTEBOOK = TUTORIALS / "researcher.ipynb"
#: Runs one cell after another, as a notebook does: commands behind `!`, and what stands alone at the end is shown.
RUN = """
import ast, json, subprocess, sys
names = {}
for cell in json.loads(open(sys.argv[1]).read())["cells"]:
    source = "".join(cell["source"])
    if cell["cell_type"] == "code" and source.startswith("!"):
        for line in source.splitlines():
            subprocess.run(line.removeprefix("!"), shell=True, check=True, stdout=subprocess.DEVNULL)
    elif cell["cell_type"] == "code":
        *body, last = ast.parse(source).body
        exec(compile(ast.Module(body, []), "cell", "exec"), names)
        if isinstance(last, ast.Expr):
            shown = eval(compile(ast.Expression(last.value), "cell", "eval"), names)
            if shown is not None:
                print(type(shown).__name__, len(shown._repr_html_()))
        else:
            exec(compile(ast.Module([last], []), "cell", "exec"), names)
"""


def test_the_notebook_is_that_of_the_page():
    page = (TUTORIALS / "researcher.md").read_text(encoding="utf-8")
    made = runpy.run_path(str(TUTORIALS / "notebook.py"))["notebook"](page)
    assert NOTEBOOK.read_text(encoding="utf-8") == made, "run: python docs/tutorials/notebook.py"


def test_it_has_everything_that_the_format_asks_for():
    """The required fields of nbformat 4.5."""
    whole = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    assert (whole["nbformat"], whole["nbformat_minor"]) == (4, 5) and isinstance(whole["metadata"], dict)
    assert len({cell["id"] for cell in whole["cells"]}) == len(whole["cells"])
    for cell in whole["cells"]:
        code = {"execution_count", "outputs"} if cell["cell_type"] == "code" else set()
        assert cell.keys() == {"cell_type", "id", "metadata", "source"} | code and cell["source"]
        for output in cell.get("outputs", ()):
            assert output.keys() == {"output_type", "name", "text"} and output["name"] == "stdout"


@pytest.mark.slow
def test_its_cells_run_in_order(tmp_path, at_hand):
    path = f"{at_hand}{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        [sys.executable, "-c", RUN, str(NOTEBOOK)],
        cwd=tmp_path, env={**os.environ, "PATH": path}, capture_output=True, text=True, timeout=PATIENCE_S,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    shown = dict(
        line.split() for line in done.stdout.splitlines() if line.split()[0] in ("Workload", "Plan", "Timeline")
    )
    assert len(shown) == 3 and all(0 < int(size) < 200_000 for size in shown.values())


def test_every_noun_shows_itself_without_a_script():
    job, cluster = workload("resnet-v1-50"), legato.Cluster.derive(workers=4, bandwidth_bps=1e9, latency_s=1e-5)
    plan = legato.plan(job, cluster)
    whole = legato.job("llama-3-8b", tensor=2, pipeline=2, gpus=1024)
    nouns = [job, cluster, plan, legato.simulate(job, plan, cluster), legato.lower_bound(job, cluster), whole]
    nouns += [legato.predict(whole), legato.layouts("llama-3-8b", gpus=8, batch=8, number=2)]
    nouns.append(legato.Wrapping("blocks", tuple(legato.Group((f"h.{k}",)) for k in range(40)), micro_batches=2))
    nouns.append(legato.compare(job, cluster, ["ddp", "fifo", plan]))
    nouns += [legato.sweep(one, bandwidth_bps=[1e9, 2e9], fidelity="formulas", jobs=1) for one in (job, whole)]
    for noun in nouns:
        shown = noun._repr_html_()
        assert len(shown) < 200_000 and "<script" not in shown and shown.startswith("<")
    names = legato.Cluster(2, {"<b>": cluster.cost()})._repr_html_()
    assert "&lt;b&gt;" in names and "<b>" not in names
