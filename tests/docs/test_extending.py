"""docs/extending.md: its scheduler and its fabric as files of their own, and all three in a copy of legato."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from markdown_it import MarkdownIt
from support import PATIENCE_S

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "extending.md"
#: Where the page puts its files in legato, and adds their entries: (registry, its dict, import).
REGISTRIES = (
    ("legato/schedule/published/__init__.py", "PUBLISHED", "from legato.schedule.published import sweep_up"),
    ("legato/collectives/__init__.py", "COLLECTIVES", "from legato.collectives.chain import CHAIN"),
    ("legato/simulator/flow/fabrics/__init__.py", "FABRICS", "from legato.simulator.flow.fabrics.star import Star"),
)


def page():
    """The text of the page, its blocks, and its files by name."""
    text = PAGE.read_text(encoding="utf-8")
    blocks = [(token.info, token.content) for token in MarkdownIt().parse(text) if token.type == "fence"]
    files = [content for language, content in blocks if language == "python" and content.startswith('"""')]
    paths = re.findall(r"[Ss]ave it as `([\w./]+)`", text)
    return text, blocks, {Path(path).name: content for path, content in zip(paths, files, strict=True)}


def test_they_stand_where_names_do(tmp_path):
    """The page's own commands, beside files that it has saved."""
    _, blocks, files = page()
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    legato(ROOT, "workload", "resnet-v1-50", "-o", "job.json", at=tmp_path)
    commands = [content.split()[1:] for language, content in blocks if content.startswith("legato ")]
    assert len(commands) == 2
    rows = [json.loads(legato(ROOT, *command, "--json", at=tmp_path)) for command in commands]
    assert [row["scheduler"] for row in rows[0]] == ["ddp", "sweep-up", "legato"]
    assert [row["fabric"] for row in rows[1]] == ["ring", "Star"]


@pytest.fixture(scope="module")
def copy(tmp_path_factory):
    """A copy of legato that was extended as the page says."""
    folder = tmp_path_factory.mktemp("extended")
    shutil.copytree(ROOT / "legato", folder / "legato")
    text, blocks, files = page()
    entries = [content for language, content in blocks if language == "text" and content.startswith(" ")]
    assert len(files) == len(entries) == len(REGISTRIES)
    for (registry, _, _), (name, content) in zip(REGISTRIES, files.items(), strict=True):
        path = f"{Path(registry).parent}/{name}"
        assert not (folder / path).exists() and f"`{Path(path).parent}/" in text
        (folder / path).write_text(content)
    for (path, registry, line), entry in zip(REGISTRIES, entries, strict=True):
        assert f"`{path}`" in text and f"`{registry}`" in text
        here = (folder / path).read_text()
        here, added = re.subn(
            rf"^({registry}: dict\[.*\] = {{\n(.+\n)+?)}}$", rf"\1{entry}}}", here, flags=re.MULTILINE
        )
        assert added == 1
        (folder / path).write_text(here.replace("\nfrom legato", f"\n{line}\nfrom legato", 1))
    return folder


def legato(copy, *arguments, at=None):
    done = subprocess.run(
        [sys.executable, "-m", "legato", *arguments],
        cwd=at or copy, env={**os.environ, "PYTHONPATH": str(copy)}, capture_output=True, text=True, timeout=PATIENCE_S,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_scheduler_plans(copy):
    legato(copy, "workload", "resnet-v1-50", "-o", "job.json")
    rows = json.loads(legato(copy, "plan", "job.json", "--workers", "16", "--json"))
    seconds = {row["scheduler"]: row["iteration_s"] for row in rows}
    mine = next(row for row in rows if row["scheduler"] == "sweep-up")
    assert mine["gap"] >= 0
    # It merges what waits anyway, so it beats a message a tensor; both hold the forward pass back to the end.
    assert seconds["merge-optimal"] <= mine["iteration_s"] < seconds["fifo"]
    assert min(seconds, key=seconds.get) == "legato"


def test_the_fabric_simulates(copy):
    legato(copy, "workload", "resnet-v1-50", "-o", "one.json")
    plan = "import legato; from legato.schedule import schedule; w = legato.read('one.json', legato.Workload); "
    plan += "legato.write('single.json', schedule('single', w, legato.Cluster.derive(8, 1e10, 0.0)))"
    subprocess.run([sys.executable, "-c", plan], cwd=copy, env={**os.environ, "PYTHONPATH": str(copy)}, check=True)
    options = (
        "--workers",
        "8",
        "--bandwidth",
        "10Gbit",
        "--latency",
        "0",
        "--plan",
        "single.json",
        "--fabric",
        "star,tree",
        "--json",
    )
    star, _ = json.loads(legato(copy, "simulate", "one.json", *options))
    assert star["fabric"] == "star"
    job = json.loads((copy / "one.json").read_text())
    m = sum(tensor["nbytes"] for tensor in job["tensors"]) * 8 / 1e10
    compute = sum(op["duration_s"] for op in job["ops"])
    assert star["iteration_s"] == pytest.approx(compute + 2 * 7 * m, rel=1e-9)


def test_the_collective_has_a_cost_and_sends_what_it_costs(copy):
    """2 (n-1) times the latency and the whole message, by formulas and transfer by transfer."""
    legato(copy, "workload", "alexnet-v2", "-o", "two.json")
    network = ("--workers", "6", "--bandwidth", "10Gbit", "--latency", "20us", "--fabric", "chain", "--json")
    seconds = [
        json.loads(legato(copy, "simulate", "two.json", *network, "--fidelity", fidelity))[0]["iteration_s"]
        for fidelity in ("formulas", "transfers")
    ]
    assert seconds[0] == pytest.approx(seconds[1], rel=1e-9)
    job = json.loads((copy / "two.json").read_text())
    assert seconds[0] > 10 * sum(tensor["nbytes"] for tensor in job["tensors"]) * 8 / 1e10


def test_the_tests_over_all_of_them_take_them_in(copy):
    shutil.copytree(ROOT / "tests", copy / "tests", dirs_exist_ok=True)
    tests = (
        "tests/schedule/test_plans.py",
        "tests/simulator/flow/test_fabrics.py",
        "tests/collectives",
        "tests/pytorch/network/test_collectives.py",
    )
    which = "sweep-up or star or chain or exact"
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", *tests, "-k", which],
        cwd=copy, env={**os.environ, "PYTHONPATH": f"{copy}{os.pathsep}{copy / 'tests'}"},
        capture_output=True, text=True, timeout=PATIENCE_S,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    passed = set(re.findall(r"(\w+)\[([\w-]+)\](?= PASSED)", done.stdout))
    assert {"sweep-up", "star", "chain", "chain-17"} <= {name for _, name in passed}
    assert ("test_sums_are_exact", "2") in passed  # over gloo, by all collectives
