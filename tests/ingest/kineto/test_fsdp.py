"""The groups of FSDP2 in traces: made ones that follow the rules, and real ones of two gloo ranks."""

import json
import statistics
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import fsdp_samples
from support import kineto_samples as samples
from support.chains import random_chain
from support.command import run
from support.ranks import run_script
from support.strategies import examples

from legato.core.cluster import LinearCost
from legato.core.wrapping import Group, Wrapping
from legato.fsdp.costs import Costs
from legato.fsdp.rules import resolve
from legato.fsdp.units import Precision, Unit
from legato.ingest.kineto.importer import import_kineto
from legato.whole_jobs.traced import replay
from legato.whole_jobs.traced import run as run_program


def imported(folder, units, wrapping, costs, precision, **options):
    text, step = fsdp_samples.trace(units, wrapping, costs, precision, **options)
    path = folder / "t.json"
    path.write_text(text)
    return import_kineto([path]), step


@examples(60)
@given(st.integers(0, 2**32), st.sampled_from([(1, "each"), (1, "each"), (2, "each"), (3, "last")]))
def test_the_groups_of_a_made_trace_are_found(tmp_path_factory, seed, accumulated):
    units, costs, precision = random_chain(seed, plain=True)
    micro_batches, sync = accumulated
    wrapping = msgspec.structs.replace(
        fsdp_samples.random_wrapping(seed, units), micro_batches=micro_batches, sync=sync
    )
    found, step = imported(tmp_path_factory.mktemp("t"), units, wrapping, costs, precision)
    groups, sharded = resolve(units, wrapping), found.sharded
    assert (sharded.odd, sharded.ranks, sharded.micro_batches) == ("", 8, micro_batches)
    assert (sharded.gathered_itemsize, sharded.reduced_itemsize) == precision[1:]
    assert [group.modules for group in sharded.groups] == [group.modules for group in wrapping.groups]
    held = set()
    for group, true in zip(sharded.groups, groups, strict=False):
        assert (group.gathered, group.scattered) == (true.gathered, true.scattered)
        assert group.reshard == true.reshard
        assert group.gathers == micro_batches * (2 if group.reshard else 1)
        assert group.scatters == (1 if sync == "last" else micro_batches)
        assert group.forward_s == pytest.approx([units[u].forward_s for u in true.units])
        assert group.backward_s == pytest.approx(sum(units[u].backward_s for u in true.units))
        assert group.input_needs_gradient == (true.first > 0)
        held.update(true.units)
    root = [u for u in range(len(units)) if u not in held]
    assert sharded.root.gathered == sum(units[u].gathered for u in root)
    assert sum(forward_s for forward_s, _ in sharded.root_s) == pytest.approx(sum(units[u].forward_s for u in root))
    assert sum(backward_s for _, backward_s in sharded.root_s) == pytest.approx(sum(units[u].backward_s for u in root))
    for nbytes, seconds in sharded.gathers:
        assert seconds == pytest.approx(costs.gather.cost(nbytes))
    for nbytes, seconds in sharded.gathers_in_host:
        assert seconds == pytest.approx(costs.gather_in_host.cost(nbytes))
    for nbytes, seconds in sharded.scatters:
        assert seconds == pytest.approx(costs.scatter.cost(nbytes))
    assert sharded.copy_s_per_byte == pytest.approx(costs.copy_s_per_byte)
    assert sharded.update_s == pytest.approx(fsdp_samples.UPDATE_US * 1e-6)
    assert found.ranks[0].iteration_s == pytest.approx(step.seconds + sharded.update_s)
    if any(not isinstance(group.reshard, bool) for group in sharded.groups):
        assert "of an unknown group" in found.whole.lacking
    else:
        assert replay(found.whole.program).seconds == pytest.approx(found.whole.program.traced_s)


@pytest.mark.parametrize("factor", [0.25, 0.5, 2, 4])
def test_a_program_on_another_network_takes_about_what_the_rules_say(tmp_path, factor):
    """What waits for hidden collectives is not in a trace: the median of many steps is right, and none is far off."""
    off = []
    for seed in range(30):
        units, costs, precision = random_chain(seed, plain=True)
        drawn = fsdp_samples.random_wrapping(seed, units)
        groups = tuple(msgspec.structs.replace(group, reshard=bool(group.reshard)) for group in drawn.groups)
        wrapping = msgspec.structs.replace(drawn, groups=groups)
        program = imported(tmp_path, units, wrapping, costs, precision)[0].whole.program
        other = msgspec.structs.replace(
            costs, gather=slower(costs.gather, factor), scatter=slower(costs.scatter, factor)
        )
        seconds = run_program(program, [factor * one.traced_s for one in program.communications]).seconds
        _, step = fsdp_samples.trace(units, wrapping, other, precision)
        off.append((seconds - fsdp_samples.UPDATE_US * 1e-6) / step.seconds - 1)
    assert statistics.median(off) == pytest.approx(0, abs=1e-6)
    assert min(off) > -0.05 and max(off) < 0.25


def slower(cost, factor):
    return LinearCost(cost.alpha_s * factor, cost.beta_s_per_byte * factor, cost.floor_s * factor)


def test_how_far_ahead_groups_are_gathered(tmp_path):
    units, costs, precision = random_chain(5, plain=True)
    groups = tuple(Group((unit.path,)) for unit in units)
    assert len(groups) > 4
    for depths, ahead in (((0, 0), (0, 1)), ((2, 3), (2, 3))):
        found, _ = imported(tmp_path, units, Wrapping("traced", groups, *depths, 2), costs, precision)
        for back in (0, 1):
            assert max(group.ahead[back] for group in found.sharded.groups) == ahead[back]
        assert found.sharded.buffers == 2


def test_exposed_gathers_are_told_by_pass(tmp_path):
    """Of all gathers, the first one of the forward pass is exposed, and of the reductions the last one."""
    units = [Unit(f"u{k}", 1.0, 2.0, 800, 800, 800, input_needs_gradient=k > 0, named=k) for k in range(4)]
    cost = LinearCost(0.5, 0.0)
    wrapping = Wrapping("traced", tuple(Group((unit.path,)) for unit in units))
    found, _ = imported(tmp_path, units, wrapping, Costs(8, cost, cost, cost), Precision())
    kinds = {(k.kind, k.phase): (k.communication_s, k.exposed_s) for k in found.ranks[0].kinds}
    assert kinds == {
        ("all_gather", "forward"): pytest.approx((2.0, 0.5)),
        ("all_gather", "backward"): pytest.approx((2.0, 0.0)),
        ("reduce_scatter", None): pytest.approx((2.0, 0.5)),
    }


def test_the_second_forward_pass_of_a_step_is_one(tmp_path):
    """Of two micro-batches, the gathers of both forward passes are told as such."""
    units, costs, precision = random_chain(5, plain=True)
    groups = tuple(Group((unit.path,)) for unit in units)
    times = []
    for count in (1, 2):
        wrapping = Wrapping("traced", groups, micro_batches=count)
        found, _ = imported(tmp_path, units, wrapping, costs, precision)
        times.append({(k.kind, k.phase): k.communication_s for k in found.ranks[0].kinds})
    assert times[1] == pytest.approx({kind: 2 * seconds for kind, seconds in times[0].items()})


def test_what_the_rules_do_not_cover(tmp_path):
    units, costs, precision = random_chain(5, plain=True)
    wrapping = Wrapping("traced", tuple(Group((unit.path,)) for unit in units))
    replicated = msgspec.structs.replace(costs, all_reduce=costs.gather)
    found, _ = imported(tmp_path, units, wrapping, replicated, precision, workers=16)
    assert "HSDP" in found.sharded.odd
    path = tmp_path / "u.json"
    text, _ = fsdp_samples.trace(units, wrapping, costs, precision)
    path.write_text(text.replace("(u1)", "(u1) [pg=4]"))
    assert import_kineto([path]).sharded.odd == "the groups are sharded over several meshes"
    path.write_text(text.replace("In msg nelems", "Elements"))
    assert "record_shapes" in import_kineto([path]).sharded.odd
    path.write_text(text.replace("(u2)", "(u1)"))
    assert import_kineto([path]).sharded.odd == "u1 runs more than once in a forward pass"
    path.write_text(text.replace("FSDP::", "DDP::"))
    assert import_kineto([path]).sharded is None


@pytest.fixture(scope="module")
def traces(tmp_path_factory):
    pytest.importorskip("torch")
    folder = tmp_path_factory.mktemp("profiled")
    run_script([str(Path(samples.__file__).with_name("profiled.py")), "sharded"], folder, ranks=2)
    return [folder / f"sharded.{rank}.json" for rank in range(2)]


def test_a_real_step_of_torch(traces):
    found = import_kineto(traces)
    sharded = found.sharded
    block, head, embedding = 4 * (2 * 64 * 256 + 64 + 256 + 2 * 64), 4 * (64 * 50 + 50), 4 * 50 * 64
    assert [group.modules for group in sharded.groups] == [
        ("layers.0",), ("layers.1", "layers.2"), ("layers.3",), ("head", "layers.4"),
    ]  # fmt: skip
    sizes = [block, 2 * block, block, block + head]
    assert [group.gathered for group in sharded.groups] == [group.scattered for group in sharded.groups] == sizes
    assert (sharded.root.gathered, sharded.ranks) == (embedding, 2)
    assert [group.reshard for group in sharded.groups] == [True, True, True, False]
    assert [group.ahead for group in sharded.groups] == [(0, 1), (0, 1), (0, 1), (0, 0)]
    assert [len(group.forward_s) for group in sharded.groups] == [1, 2, 1, 2]
    assert all(group.input_needs_gradient and group.backward_s > 0 for group in sharded.groups)
    assert (sharded.odd, sharded.micro_batches, sharded.buffers) == ("", 1, 1)
    assert len(sharded.gathers) == 3 * 8 and len(sharded.scatters) == 3 * 5
    assert {(k.kind, k.phase) for k in found.ranks[0].kinds} >= {("all_gather", "forward"), ("all_gather", "backward")}


def test_the_program_of_a_real_job_has_all_collectives_of_all_ranks(traces):
    found = import_kineto(traces)
    program, operations = found.whole.program, {"all_gather": [], "reduce_scatter": []}
    for one in program.communications:
        operations[one.operation].append(one.nbytes)
        assert (one.kind, one.groups) == ("data", ((0, 1),)) and one.traced_s > 0
    sizes = [found.sharded.root.gathered, *(group.gathered for group in found.sharded.groups)]
    assert sorted(operations["reduce_scatter"]) == sorted(sizes)
    assert set(operations["all_gather"]) == set(sizes) and len(operations["all_gather"]) == 8
    step = replay(program)
    parts = step.computing_s + step.idle_s + step.late_s + step.exposed_s["data"]
    assert parts == pytest.approx(step.seconds) and step.computing_s > 0


def test_the_command_tells_the_groups_of_a_real_job(traces, capsys):
    status, out, err = run(capsys, "advise", *traces)
    assert status == 0 and "No plan" not in out and "Traceback" not in err
    assert "Groups of FSDP2, as traced" in out and "layers.1, layers.2" in out and "head, layers.4" in out
    assert "groups as traced" in out and "A traced reduce-scatter takes" in out and "all-gather (backward)" in out
    assert "The prediction of the traced groups is off by" in out
    status, out, _ = run(capsys, "advise", "--json", traces[0])
    (job,) = json.loads(out)["jobs"]
    assert [group["modules"] for group in job["groups"]][1:3] == [["layers.0"], ["layers.1", "layers.2"]]
    assert job["rows"][0]["name"] == "groups as traced" and job["rows"][0]["wrapping"]["groups"]
