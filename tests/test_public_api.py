"""What `import legato` offers: its names, their types, and that neither it nor the command line imports torch."""

import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import legato
from legato.core.axes import NETWORK
from legato.schedule import SCHEDULERS, SERVER_SCHEDULERS, PlanOptions
from legato.schedule.published.ddp import ddp
from legato.simulator.flow import FABRICS, Network, simulate_flow
from legato.sweeps.anything import Axes

ROOT = Path(__file__).resolve().parents[1]
WITHOUT_TORCH = "import sys\nsys.modules['torch'] = None\nimport importlib.util as u\nfind = u.find_spec\n"
WITHOUT_TORCH += "u.find_spec = lambda name, *_: None if name == 'torch' else find(name, *_)\n"

JOB = legato.Workload(
    "toy",
    (legato.Op("f", "forward", 0.01), legato.Op("b", "backward", 0.02, (0,))),
    (legato.Tensor("w", 4_000_000, 1, (0,)), legato.Tensor("v", 1_000_000, 1, (0,))),
)
CLUSTER = legato.Cluster.derive(4, 1e9, 1e-5)


def run(code):
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_public_names_are_what_all_says_and_need_no_torch():
    code = """
import sys
import legato
assert not {"torch", "numpy", "numba"} & set(sys.modules)
for name in set(legato.__all__) - set(legato._WITH_TORCH):
    getattr(legato, name)
modules = {n for n in vars(legato) if f"legato.{n}" in sys.modules}
public = {n for n in vars(legato) if not n.startswith("_")} - modules
internal = {"annotations", "importlib", "find_spec", "Any", "Literal", "TYPE_CHECKING"}
print(sorted(public - internal - set(legato.__all__)))
assert not modules & set(legato.__all__)
assert set(legato.__all__) <= set(dir(legato))
"""
    assert run(code).strip() == "[]"


def test_the_axes_of_a_sweep_are_those_of_networks():
    assert list(Axes.__annotations__) == [axis.field for axis in NETWORK]


def test_without_torch_everything_else_is_there():
    code = (
        WITHOUT_TORCH
        + """
import pydoc, legato
from legato import *
assert plan is legato.plan and callable(lower_bound) and "distribute" not in legato.__all__
text = pydoc.plain(pydoc.render_doc(legato))
assert "simulate(workload" in text and "lower_bound(" in text and "DistributedDataParallel(model)" in text
for name in legato._WITH_TORCH:
    try:
        getattr(legato, name)
    except ModuleNotFoundError as error:
        print(error)
"""
    )
    assert run(code).splitlines() == [f"legato.{name} needs PyTorch: pip install torch" for name in legato._WITH_TORCH]


def test_a_name_that_does_not_exist():
    with pytest.raises(AttributeError, match="'legato' has no attribute 'paln'"):
        legato.paln  # noqa: B018


def test_with_torch_help_and_star_have_its_functions():
    pytest.importorskip("torch")
    code = "import pydoc, legato; from legato import *; print(pydoc.plain(pydoc.render_doc(legato)), distribute)"
    printed = run(code)
    assert all(f"\n    {name}(" in printed or f"\n    class {name}(" in printed for name in legato._WITH_TORCH)


def test_plan_predict_and_prove():
    planned = legato.plan(JOB, CLUSTER)
    timeline, bound = legato.simulate(JOB, planned, CLUSTER), legato.lower_bound(JOB, CLUSTER)
    assert planned.scheduler == "legato" and isinstance(bound, legato.Bound)
    assert bound.seconds <= timeline.iteration_s <= legato.simulate(JOB, ddp(JOB, CLUSTER), CLUSTER).iteration_s
    assert len(legato.plan(JOB, CLUSTER, "ddp", bucket_bytes=1).messages) == 2
    assert len(legato.plan(JOB, CLUSTER, "ddp", first_bucket_bytes=10**9).messages) == 1
    with pytest.raises(legato.InputError, match="did you mean 'legato'"):
        legato.plan(JOB, CLUSTER, "legatto")


@pytest.mark.parametrize("fabric", ["ring", FABRICS["tree"], "hierarchical"])
def test_simulate_on_a_fabric(fabric):
    planned = legato.plan(JOB, CLUSTER, "single")
    network = Network(workers=4, bandwidth_bps=1e9, latency_s=1e-5)
    expected = simulate_flow(JOB, planned, fabric, network)
    timeline = legato.simulate(JOB, planned, CLUSTER, fabric=fabric)
    assert timeline.iteration_s == expected.iteration_s and timeline.spans
    with pytest.raises(legato.InputError, match="compute"):
        legato.simulate(JOB, planned, CLUSTER, fabric=fabric, compute="unlimited")


def test_a_measured_cluster_has_the_network_that_its_cost_implies():
    planned = legato.plan(JOB, CLUSTER, "single")
    measured = legato.Cluster(4, {"gloo": CLUSTER.cost("ring")})
    expected = legato.simulate(JOB, planned, CLUSTER, fabric="ring").iteration_s
    assert legato.simulate(JOB, planned, measured, fabric="ring").iteration_s == pytest.approx(expected)
    for workers, beta in ((4, 0.0), (1, 1e-9)):
        nothing = legato.Cluster(workers, {"gloo": legato.LinearCost(1e-5, beta)})
        with pytest.raises(legato.InputError, match="for a bandwidth"):
            legato.simulate(JOB, planned, nothing, fabric="ring")


def test_the_command_line_imports_torch_only_in_commands_that_need_it():
    heavy = {"torch", "transformers", "numpy", "numba", "pyarrow", "plotly"}
    assert run(f"import sys, legato.cli; print({heavy} & set(sys.modules))").strip() == "set()"
    # compiled searches and bounds are loaded where they are needed
    assert run("import sys, legato.schedule.search.legato; print({'numba'} & set(sys.modules))").strip() == "set()"


def test_type_checkers_know_the_options_of_every_scheduler():
    every = (SCHEDULERS | SERVER_SCHEDULERS).values()
    options = {name for scheduler in every for name in list(inspect.signature(scheduler).parameters)[2:]}
    assert options == set(PlanOptions.__annotations__)


def test_types_of_lazy_names_are_known(tmp_path):
    """A user's script under a strict type checker."""
    (tmp_path / "script.py").write_text("""
from typing import Any, assert_type
import legato
from legato import *

def own(job: legato.Workload, cluster: legato.Cluster) -> legato.Plan:
    return legato.plan(job, cluster)

def train(job: legato.Workload, cluster: legato.Cluster, model: Any, optimizer: Any) -> None:
    plan = legato.plan(legato.read("w.json"), legato.read("c.json"), "ddp", bucket_bytes=1, shard="optimizer")
    legato.plan(job, cluster, shrad="optimizer")  # pyrefly: ignore[no-matching-overload]
    legato.plan(job, cluster, shard="optimiser")  # pyrefly: ignore[no-matching-overload]
    assert_type(plan, legato.Plan)
    assert_type(legato.plan(job, cluster, shard="parameters", gpus_per_host=8), legato.Wrapping)
    assert_type(legato.simulate(job, plan, cluster, fabric="ring"), legato.Timeline)
    assert_type(legato.lower_bound(job, cluster), legato.Bound)
    assert_type(lower_bound(job, cluster).seconds, float)
    assert_type(legato.capture(model, optimizer, lambda: model()), Workload)
    assert_type(legato.calibrate().cluster, Cluster)
    whole = legato.job("llama-3-70b", tensor=8, pipeline=4, data=2, machine="h100")
    assert_type(whole, legato.Job)
    assert_type(legato.predict(whole).seconds, float)
    assert_type(legato.layouts("llama-3-70b", gpus=64, batch=64).number, int)
    assert_type(legato.sweep(job, bandwidth_bps=[1e9, 2e9], scheduler="ddp")[0].workload, str)
    assert_type(legato.sweep(whole, bandwidth_bps=1e9)[0].tokens_per_s, float | None)
    legato.sweep(job, bandwith_bps=1e9)  # pyrefly: ignore[no-matching-overload]
    assert_type(legato.compare(job, cluster, ["ddp", own, plan])[0].iteration_s, float)
    assert_type(legato.plan(job, cluster, own), legato.Plan)
    assert_type(str(legato.advise("traces")), str)
    legato.report(whole, plan, path="page.html")
    legato.job("llama-3-70b", tensr=8)  # pyrefly: ignore[unexpected-keyword]
    legato.distribute(model, optimizer, plan)[0].no_sync()
    parameter_servers(model, optimizer, lambda m, o: None, nothing_like_it=1)  # pyrefly: ignore[unexpected-keyword]
    legato.plann  # pyrefly: ignore[missing-attribute]
""")
    (tmp_path / "pyrefly.toml").write_text(f"""
preset = "strict"
project-includes = ["script.py"]
search-path = ["{ROOT}"]
python-interpreter-path = "{sys.executable}"
errors = {{unused-ignore = "error"}}
""")
    done = subprocess.run([sys.executable, "-m", "pyrefly", "check"], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
