"""Which steps count, and which ranks record: in this process, without a job."""

import sys
import time

import pytest
import torch
from support import PATIENCE_S
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from legato.core.errors import InputError
from legato.pytorch.private.optimizers import has_step_hooks, observe_step
from legato.watch import Settings, steps
from legato.watch.delivery import Delivery
from legato.watch.steps import MOST_RANKS, Watch, recording_ranks


@pytest.fixture
def watch(monkeypatch, tmp_path):
    """What watches with these settings; `delivered` are the deliveries that it has started, which do nothing."""
    monkeypatch.setattr(steps, "on_profilers", lambda begins, ends: None)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    delivered = []
    monkeypatch.setattr(Delivery, "start", lambda self: delivered.append(self))

    def make(**settings):
        made = Watch(Settings(**settings))
        made.delivered = delivered
        return made

    return make


def optimizer(*sizes):
    return torch.optim.SGD([nn.Parameter(torch.zeros(size)) for size in sizes])


def test_small_jobs_record_on_all_ranks_and_large_ones_on_whole_hosts():
    assert recording_ranks(MOST_RANKS, 8) == list(range(MOST_RANKS))
    sample = recording_ranks(1024, 8)
    assert len(sample) == MOST_RANKS
    assert {rank // 8 for rank in sample} == {0, 32, 64, 96}
    assert recording_ranks(100, 64) == list(range(64))


@pytest.mark.parametrize("world", [33, 40, 100, 4096])
@pytest.mark.parametrize("per_host", [1, 3, 8, 72])
def test_samples_have_rank_0_and_no_more_than_a_host_too_many(world, per_host):
    sample = recording_ranks(world, per_host)
    assert sample[0] == 0 and sample == sorted(set(sample))
    assert len(sample) <= max(MOST_RANKS, per_host)


def test_a_recording_has_the_steps_that_were_asked_for(watch):
    watched, stepping = watch(after=3, steps=2), optimizer(4)
    for _ in range(6):
        watched.stepped(stepping)
        assert not watched.delivered
    watched.stepped(stepping)
    (delivery,) = watched.delivered
    assert not delivery.problem
    text = delivery.trace.read_text()
    assert text.count('"name": "ProfilerStep#') == 2


def test_steps_of_the_largest_optimizer_count(watch):
    watched, small, large = watch(after=2, steps=1), optimizer(2), optimizer(2, 3)
    watched.stepped(small)
    for _ in range(4):
        watched.stepped(large)
        for _ in range(5):
            watched.stepped(small)
    assert not watched.delivered
    watched.stepped(large)
    assert not watched.delivered[0].problem


def test_a_larger_optimizer_ends_a_recording_and_is_recorded_itself(watch):
    watched, small, large = watch(after=1, steps=4), optimizer(2), optimizer(3)
    for _ in range(3):
        watched.stepped(small)
    watched.stepped(large)
    assert "optimizer with more parameters" in watched.delivered[0].problem
    for _ in range(7):
        watched.stepped(large)
    assert not watched.delivered[1].problem


def test_recordings_repeat(watch):
    watched, stepping = watch(after=1, steps=1, every=5), optimizer(2)
    for _ in range(14):
        watched.stepped(stepping)
    assert [delivery.problem for delivery in watched.delivered] == ["", "", ""]


def test_a_step_that_never_comes_ends_the_recording(watch, monkeypatch):
    monkeypatch.setattr(steps, "_PATIENCE_S", 0.1)
    watched, stepping = watch(after=1), optimizer(2)
    for _ in range(4):
        watched.stepped(stepping)
    until = time.monotonic() + PATIENCE_S
    while not watched.delivered and time.monotonic() < until:
        time.sleep(0.01)
    assert "the steps to record did not end within 100 ms" in watched.delivered[0].problem
    with torch.profiler.profile():  # none runs any more
        watched.stepped(stepping)
    assert len(watched.delivered) == 1


def test_two_profilers_never_run_and_the_scripts_own_comes_first(watch, monkeypatch):
    told = {}
    monkeypatch.setattr(steps, "on_profilers", lambda begins, ends: told.update(begins=begins, ends=ends))
    watched, stepping = watch(after=1, steps=4), optimizer(2)
    for _ in range(4):
        watched.stepped(stepping)
    told["begins"]()
    assert watched.delivered[0].problem == "the script profiles itself"
    with torch.profiler.profile() as profiler:
        watched.stepped(stepping)
    assert profiler.events() is not None


def test_what_goes_wrong_is_one_line_and_the_script_goes_on(watch, monkeypatch, capsys):
    monkeypatch.setattr(sys, "__stderr__", sys.stderr)
    monkeypatch.setattr("tempfile.mkdtemp", lambda **_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    watched, stepping = watch(after=1), optimizer(2)
    for _ in range(10):
        watched.stepped(stepping)
    assert capsys.readouterr().err.splitlines() == [
        "legato: watch: no verdict: OSError: [Errno 28] No space left on device"
    ]


def test_its_hook_is_none_that_updates_have_to_wait_for():
    seen, stepping = [], optimizer(2)

    def observe(optimizer, args, kwargs):
        seen.append(optimizer)

    observe.only_observes = True
    handle = register_optimizer_step_post_hook(observe)
    try:
        assert not has_step_hooks(stepping)
        observe_step(stepping)
        assert seen == [stepping]
        stepping.register_step_post_hook(lambda *_: None)
        observe_step(stepping)  # torch has run it
        assert seen == [stepping] and has_step_hooks(stepping)
    finally:
        handle.remove()


def test_settings_that_contradict_one_another_are_refused():
    with pytest.raises(InputError, match=r"--every 6: too few for 4 recorded steps \(expected 7 or more\)"):
        Settings(every=6)
    with pytest.raises(InputError, match="--every with --stop"):
        Settings(every=1000, stop=True)
