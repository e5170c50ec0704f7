"""What was measured of plans: medians, quartiles, and files that make no sense."""

import pytest

from legato.core.errors import FileError, InputError
from legato.core.files import decode, encode
from legato.core.measurement import MeasuredPlan, Measurement


def test_the_median_and_the_quartiles_of_iterations():
    plan = MeasuredPlan.of("ddp", [5.0, 1.0, 2.0, 4.0, 3.0], predicted_s=2.4)
    assert (plan.measured_s, plan.quartiles_s, plan.iterations) == (3.0, (2.0, 4.0), 5)
    assert plan.error == pytest.approx(-0.2) and MeasuredPlan.of("ddp", [3.0]).error is None
    assert MeasuredPlan.of("ddp", [3.0]).quartiles_s == (3.0, 3.0)
    assert MeasuredPlan.of("ddp", [3.0, 1.0]).quartiles_s == (1.5, 2.5)
    for seconds in (0.1, 0.7, 1.1):  # rounding puts no quartile beyond the median
        assert MeasuredPlan.of("ddp", [seconds] * 7).quartiles_s == (seconds, seconds)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"measured_s": 5.0}, "measured_s: 5.0, quartiles 1.0 to 2.0"),
        ({"quartiles_s": (-1.0, 2.0)}, "quartiles -1.0"),
        ({"quartiles_s": (1.0, float("inf"))}, "to inf"),
        ({"predicted_s": -1.0}, "predicted_s: -1.0"),
    ],
)
def test_times_that_make_no_sense(change, said):
    with pytest.raises(InputError, match=said):
        MeasuredPlan(**{"scheduler": "x", "measured_s": 1.5, "quartiles_s": (1.0, 2.0), "iterations": 3} | change)


def test_a_file_without_plans_is_one_line():
    whole = encode(Measurement("job", "2 workers", (MeasuredPlan.of("ddp", [1.0]),)))
    assert decode(whole) == Measurement("job", "2 workers", (MeasuredPlan.of("ddp", [1.0]),))
    with pytest.raises(FileError, match="plans: none given"):
        decode(b'{"format":"legato.measurement/1","job":"","network":"","plans":[]}')
