"""Training that goes at another pace than its plan was made for."""

from types import SimpleNamespace

import pytest
from support import drifting

from legato.pytorch.runtime.attached.drift import SAMPLE, WINDOW, DriftMonitor


class Training:
    """Passes of known pace: what a `DriftMonitor` sees of them, and what it says."""

    def __init__(self, paces):
        self.messages = SimpleNamespace(passes=0, tracer=None)
        self.gathered = []
        self.drift = DriftMonitor(self.gather)
        self.paces = iter(paces)

    def gather(self, mine):
        self.gathered.append(mine)
        return next(self.paces)

    def run(self, windows):
        said = []
        for _ in range(windows * WINDOW):
            text = self.drift.pass_ended(self.messages)
            if text:
                said.append((self.messages.passes // WINDOW, text))
            if self.messages.tracer is not None:
                self.messages.tracer.switch("forward")
            self.messages.passes += 1
        return said


CALM = [(0.1, 0.05), (0.1, 0.06)]


def test_a_lasting_change_is_said_once():
    slow = [(0.1, 0.05), (0.15, 0.06)]
    training = Training([CALM, CALM, slow, slow, slow, slow, CALM, CALM, CALM])
    assert training.run(10) == [
        (4, "computation on rank 1 takes 1.50 times as long"),
        (8, "computation on rank 1 takes 0.67 times as long"),
    ]


def test_one_slow_window_is_no_change():
    slow = [(0.2, 0.2), (0.2, 0.2)]
    assert Training([CALM, slow, CALM, slow, CALM]).run(6) == []


def test_the_network_is_as_fast_as_the_rank_says_that_waits_least():
    waiting = [(0.1, 0.20), (0.1, 0.06)]
    slow = [(0.1, 0.20), (0.1, 0.12)]
    training = Training([CALM, waiting, waiting, slow, slow])
    assert training.run(6) == [(5, "communication takes 2.40 times as long")]


def test_samples_are_short_and_leave_the_user_his_own_tracer():
    training = Training([CALM] * 3)
    traced = 0
    for _ in range(2 * WINDOW):
        training.drift.pass_ended(training.messages)
        traced += training.messages.tracer is not None
        training.messages.passes += 1
    assert traced == 2 * 2 * WINDOW // SAMPLE
    own = training.messages.tracer = SimpleNamespace(switch=lambda state: None)
    training.run(1)
    assert training.messages.tracer is own and len(training.gathered) == 2


@pytest.mark.processes
def test_rank_0_says_so(two_ranks):
    (off, said, plans), (_, silent, _) = two_ranks.run(drifting.changing, None)
    assert off == 0.0 and silent == [] and len(plans) == 1
    expected = f"since the first passes under the plan {plans[0]}, computation on rank 1 takes 5.00 times as long"
    assert said == [f"{expected}; consider replanning"]


@pytest.mark.processes
def test_all_ranks_plan_anew_together(two_ranks):
    (off, said, plans), (other, _, same) = two_ranks.run(drifting.changing, "auto")
    assert off == other == 0.0 and plans == same
    assert any("computation on rank 1 takes 5.00 times as long; replanning" in line for line in said)
    assert len(plans) >= 2 and "default-buckets" not in plans
