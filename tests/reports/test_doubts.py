"""What measured times say against the calibration, and against each other."""

import pytest

from legato.reports.doubts import doubts, spread

CALM = [1.0, 1.01, 0.99, 1.0, 1.02, 1.0, 0.98, 1.0]


def test_the_spread_is_the_distance_of_the_quartiles_and_one_pause_does_not_change_it():
    assert spread([1.0, 2.0, 3.0, 4.0, 5.0]) == pytest.approx(2 / 3)
    assert spread([*CALM, 30.0]) < 0.03
    assert spread([1.0, 9.0, 1.0]) == 0.0  # too few to tell


def test_what_is_measured_on_a_quiet_machine_is_not_doubted():
    assert doubts({"ddp": CALM, "legato": CALM}, {"ddp": 0.7, "legato": 1.01}) == []
    assert doubts({"tac": CALM}, {"tac": 0.0}) == []  # parameter servers have no bound


def test_an_iteration_below_the_bound_accuses_the_calibration():
    (said,) = doubts({"ddp": CALM, "legato": CALM}, {"ddp": 1.25, "legato": 1.1})
    assert said.startswith("the calibration cannot be right") and said.endswith("run it again")
    assert "(ddp, legato) are up to 20% below the lower bound" in said


def test_iterations_that_vary_accuse_the_machine():
    (said,) = doubts({"ddp": CALM, "legato": [1.0, 1.3, 0.9, 1.6, 1.0, 1.4]}, {"ddp": 0.5, "legato": 0.5})
    assert said.startswith("the machine was busy while measuring") and "iterations of legato is 33%" in said
