"""The wheel, installed into a clean environment without PyTorch, plans and writes a report there.

It is skipped where the package index cannot be reached. On a quiet machine it
takes half a minute, most of it pip's.
"""

import os
import subprocess
import sys
import venv
from pathlib import Path

import pytest
from support import PATIENCE_S

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[1]
OUTSIDE = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}


def run(*command, folder, expected=0):
    done = subprocess.run(
        [str(part) for part in command],
        cwd=folder,
        env=OUTSIDE,
        stdin=subprocess.DEVNULL,
        text=True,
        capture_output=True,
        timeout=PATIENCE_S,
    )
    assert done.returncode == expected, f"{command}\n{done.stdout}\n{done.stderr}"
    return done


def pip(*arguments, folder):
    return subprocess.run(
        [sys.executable, "-m", "pip", "--disable-pip-version-check", *map(str, arguments)],
        cwd=folder, env=OUTSIDE, stdin=subprocess.DEVNULL, text=True, timeout=PATIENCE_S,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip


@pytest.fixture(scope="module")
def clean(tmp_path_factory):
    """The scripts folder of an environment that has the wheel, its `report` extra, and nothing else."""
    folder = tmp_path_factory.mktemp("wheel")
    venv.create(folder / "environment", with_pip=False)
    scripts = folder / "environment" / "bin"
    done = pip(
        "--python", scripts / "python", "install", "--quiet", "--no-compile", "--constraint", ROOT / "constraints.txt",
        f"{ROOT}[report]", folder=folder,
    )  # fmt: skip
    if done.returncode:
        reached = pip("download", "--quiet", "--no-deps", "--dest", folder / "tried", "hatchling", folder=folder)
        if reached.returncode:
            pytest.skip("the package index cannot be reached, so no clean environment can be made")
        pytest.fail(done.stdout)
    return scripts


def test_the_package_is_whole_and_imports_without_pytorch(clean, tmp_path):
    run(clean / "python", "-I", "-c", IMPORTS, folder=tmp_path)


IMPORTS = """
import importlib.metadata, importlib.resources, importlib.util, pathlib, sys
assert importlib.util.find_spec("torch") is None
import legato
from legato import *
assert pathlib.Path(legato.__file__).is_relative_to(sys.prefix), legato.__file__
assert Plan is legato.Plan and callable(legato.plan)
assert not set(vars()) & {"distribute", "capture"}
assert importlib.metadata.version("legato") == legato.__version__
assert (importlib.resources.files("legato") / "py.typed").is_file()
assert "Apache License" in importlib.metadata.distribution("legato").read_text("licenses/LICENSE")
"""


def test_a_report_is_made_without_pytorch(clean, tmp_path):
    legato = clean / "legato"
    run(legato, "workload", "resnet-v1-50", "-o", "resnet.json", folder=tmp_path)
    network = ("--workers", 8, "--bandwidth", "10Gbit")
    plan = run(legato, "plan", "resnet.json", *network, "-o", "plan.json", "--timeline", "t.json", folder=tmp_path)
    assert "merge-optimal" in plan.stdout
    run(legato, "report", "t.json", "-o", "report.html", folder=tmp_path)
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "Content-Security-Policy" in page and "logits/weights" in page and len(page) > 2**20  # plotly is inside


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (("demo",), "pip install jinja2 plotly torch transformers\n"),
        (("capture", "train.py:training", "-o", "w.json"), "pip install torch\n"),
        (("simulate", "resnet.json"), "pip install numba\n"),
    ],
    ids=["demo", "capture", "simulate"],
)
def test_what_is_not_installed_is_named_in_one_line(clean, tmp_path, command, said):
    (tmp_path / "train.py").touch()
    run(clean / "legato", "workload", "resnet-v1-50", "-o", "resnet.json", folder=tmp_path)
    done = run(clean / "legato", *command, folder=tmp_path, expected=2)
    assert not done.stdout and len(done.stderr.splitlines()) == 1 and said in done.stderr
