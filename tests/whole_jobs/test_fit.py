"""Efficiencies from measured steps."""

import pytest
from support.jobs import LLAMA, MIXTURE, job, replace

from legato.core.errors import InputError
from legato.core.job import Mesh
from legato.whole_jobs.fit import fit
from legato.whole_jobs.step import predict
from legato.zoo.presets import MACHINES

WIDE = {"hidden": 2048, "intermediate": 8192, "head_size": 256, "sequence": 2048}
DENSE, MIXTURE = replace(LLAMA, **WIDE), replace(MIXTURE, **WIDE, expert_intermediate=4096)
JOBS = [
    job(DENSE, machine=MACHINES["a100"]),
    job(DENSE, mesh=Mesh(tensor=2, pipeline=3, data=2), machine=MACHINES["a100"], microbatches=4),
    job(MIXTURE, Mesh(data=4, expert=2), machine=MACHINES["a100"], shard="optimizer"),
]


def seconds(one, efficiency):
    return predict(replace(one, machine=replace(one.machine, efficiency=efficiency))).seconds


@pytest.mark.parametrize("efficiency", [0.05, 0.4321, 0.99])
def test_the_efficiency_of_predicted_steps_is_found_again(efficiency):
    machine, steps, *_ = fit([(one, seconds(one, efficiency)) for one in JOBS])
    assert machine.efficiency == pytest.approx(efficiency, rel=1e-6)
    assert machine.attention_efficiency == pytest.approx(0.45, rel=1e-6)
    assert replace(machine, efficiency=0.5, attention_efficiency=0.45) == replace(MACHINES["a100"], efficiency=0.5)
    for step in steps:
        assert step.efficiency == pytest.approx(efficiency, rel=1e-6)
        assert step.predicted_s == pytest.approx(step.measured_s) == pytest.approx(step.left_out_s)
        longer_s = step.measured_s * (1 + 1e-4)
        assert fit([(step.job, longer_s)]).steps[0].efficiency == pytest.approx(
            efficiency * (1 - 1e-4 / step.product_share), rel=1e-5
        )


def test_of_several_steps_the_median_counts_and_each_is_predicted_from_the_others():
    one = JOBS[1]
    measured = {efficiency: seconds(one, efficiency) for efficiency in (0.5, 0.4, 0.3)}
    machine, steps, *_ = fit([(one, measured_s) for measured_s in measured.values()])
    assert machine.efficiency == pytest.approx(0.4)
    assert [step.predicted_s for step in steps] == pytest.approx([measured[0.4]] * 3)
    assert [step.left_out_s for step in steps] == pytest.approx([seconds(one, e) for e in (0.35, 0.4, 0.45)])
    assert fit([(one, measured[0.5])]).steps[0].left_out_s is None


def test_what_cannot_be_is_refused():
    one = JOBS[0]
    for measured_s, message in [
        (seconds(one, 1.0) * 0.999, "expected at least .*, the time with an efficiency of 1"),
        (seconds(one, 1e-3) * 1.001, "expected at most .*, the time with an efficiency of 0.001"),
        (float("nan"), "a step of nan s"),
        (0.0, "a step of 0.0 s"),
    ]:
        with pytest.raises(InputError, match=message):
            fit([(one, measured_s)])
    slow = replace(one, machine=replace(one.machine, memory_bytes_per_s=1e9))
    with pytest.raises(InputError, match="this step says little about the efficiency"):
        fit([(slow, seconds(slow, 0.5))])
    other = replace(one, machine=MACHINES["h100"])
    with pytest.raises(InputError, match="another machine than test has"):
        fit([(one, 1.0), (other, 1.0)])


#: Layers of different times, and sequences of different lengths with as many tokens.
ONE = job(replace(DENSE, layers=2), machine=MACHINES["a100"])
LARGER = job(replace(DENSE, layers=2), machine=MACHINES["a100"], microbatch=8)
LONG = job(replace(DENSE, layers=2, sequence=32_768), machine=MACHINES["a100"])


def taken(one, efficiency, host_s=0.0, attention=0.45):
    machine = replace(one.machine, efficiency=efficiency, attention_efficiency=attention)
    return predict(replace(one, machine=machine, framework=replace(one.framework, host_s=host_s))).seconds


def test_two_steps_of_different_layers_tell_the_time_of_the_host():
    found = fit([(one, taken(one, 0.6, 2e-3)) for one in (ONE, LARGER)])
    assert found.numbers == ("efficiency", "host time") and found.host_s == pytest.approx(2e-3, rel=1e-6)
    assert found.machine.efficiency == pytest.approx(0.6, rel=1e-6) and not found.odd
    assert [step.predicted_s for step in found.steps] == pytest.approx([step.measured_s for step in found.steps])
    same = fit([(ONE, taken(ONE, 0.6, 2e-3)), (ONE, taken(ONE, 0.6, 2e-3))])
    assert same.numbers == ("efficiency",) and same.machine.efficiency < 0.6


def test_long_sequences_tell_the_efficiency_of_attention():
    found = fit([(one, taken(one, 0.6, 2e-3, 0.3)) for one in (ONE, LARGER, LONG)])
    assert found.numbers == ("efficiency", "host time", "attention's efficiency")
    assert found.machine.attention_efficiency == pytest.approx(0.3, rel=1e-5)
    assert (found.machine.efficiency, found.host_s) == (pytest.approx(0.6, rel=1e-5), pytest.approx(2e-3, rel=1e-4))


def test_an_odd_step_is_named():
    found = fit([(JOBS[1], seconds(JOBS[1], efficiency)) for efficiency in (0.5, 0.5, 0.4)])
    assert [step.efficiency for step in found.odd] == [pytest.approx(0.4)]
