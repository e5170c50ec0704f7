"""What calibration measures, and what it leaves out where the network is slow."""

import importlib

import pytest
import torch.distributed as dist

from legato.pytorch.network.calibrate import SIZES, _stream, calibrate

MODULE = importlib.import_module("legato.pytorch.network.calibrate")  # the package has the function of that name
MIB = 2**20


@pytest.mark.parametrize(
    ("nbytes", "before", "count"),
    [
        (1024, [], 8),  # nothing is known
        (16 * MIB, [], 4),  # 64 MiB at once
        (64 * MIB, [], 2),  # but two messages at least
        (2 * MIB, [(MIB, 0.25)], 4),  # two seconds of messages that may take half a second
        (2 * MIB, [(MIB, 0.25), (MIB, 0.5)], 2),  # the slowest collective counts
        (2 * MIB, [(MIB, 0.001)], 8),
        (1024, [(MIB, 1.0)], 8),  # a larger one says nothing
    ],
)
def test_streams_are_short_where_messages_are_slow(nbytes, before, count):
    assert _stream(nbytes, before) == count


@pytest.fixture
def alone():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_a_slow_network_is_not_measured_at_the_largest_sizes(alone, monkeypatch):
    slow = LinearTimes(beta_s_per_byte=0.3 / MIB)
    monkeypatch.setattr(MODULE, "_times", slow)
    found = calibrate(sizes=SIZES)
    assert [sample.nbytes for sample in found.samples] == [n for n in SIZES if n <= 4 * MIB]
    assert found.cluster.cost().cost(64 * MIB) == pytest.approx(64 * 0.3, rel=1e-3)
    assert found.cluster.unpack_s_per_byte > 0


class LinearTimes:
    """Stands for the measurement: seconds are in proportion to the bytes of the messages that would be sent."""

    def __init__(self, beta_s_per_byte):
        self.beta_s_per_byte = beta_s_per_byte

    def __call__(self, once, group):
        return [self.beta_s_per_byte * do.args[0][0].nbytes if hasattr(do, "args") else do() for do in once]
