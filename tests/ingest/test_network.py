"""The cost of the network, from the all-reduces of a trace and from the output of nccl-tests."""

import json

import pytest
from support.command import run

from legato.core.errors import FileError, InputError
from legato.ingest.network import cluster_of, read_nccl_tests
from legato.ingest.traced import Notes, TracedTransfer


def transfer(nbytes, seconds, waited_s=0.0, kind="all_reduce"):
    return TracedTransfer("t", kind, nbytes, 1.0, 1.0 + seconds + waited_s, "backward", True, waited_s)


def test_a_line_is_fitted_to_the_fastest_of_each_size_without_waiting():
    sizes = (1e5, 1e6, 4e6)
    good = [transfer(int(n), 1e-4 + 1e-9 * n, waited_s=0.5) for n in sizes]
    slow = [transfer(int(n), 5e-3 + 1e-9 * n) for n in sizes]
    other = [transfer(int(n), 1e-6, kind="broadcast") for n in sizes] + [transfer(None, 1e-6)]
    cluster = cluster_of([*slow, *good, *other], 8, Notes())
    assert cluster.workers == 8
    assert (cluster.cost().alpha_s, cluster.cost().beta_s_per_byte) == pytest.approx((1e-4, 1e-9))


@pytest.mark.parametrize("sizes", [(1000,), (1000, 2000)])
def test_sizes_that_do_not_tell_latency_from_bandwidth(sizes):
    notes = Notes()
    cost = cluster_of([transfer(n, 1e-3) for n in sizes], 2, notes).cost()
    assert (cost.alpha_s, cost.beta_s_per_byte) == pytest.approx((0.0, 1e-3 / sizes[-1]))
    assert "all-reduces of sizes that differ enough" in notes.missing[0]


def test_what_a_trace_does_not_tell():
    with pytest.raises(InputError, match="no all-reduce whose size is known"):
        cluster_of([transfer(None, 1e-3)], 2, Notes())
    with pytest.raises(InputError, match="number of workers"):
        cluster_of([transfer(10, 1e-3)], None, Notes())


NEW = """# nccl-tests version 2.13.6 nccl-headers=22203 nccl-library=22203
# Collective test starting: all_reduce_perf
# nThread 1 nGpus 4 minBytes 1048576 maxBytes 4194304 step: 2(factor) warmup iters: 1 iters: 20 agg iters: 1
#
# Using devices
#  Rank  0 Group  0 Pid 111 on       node device  0 [0000:07:00] NVIDIA A100
#  Rank  1 Group  0 Pid 111 on       node device  1 [0000:0b:00] NVIDIA A100
#
#                                                              out-of-place                       in-place
#       size         count      type   redop    root     time   algbw   busbw  #wrong     time   algbw   busbw  #wrong
#        (B)    (elements)                               (us)  (GB/s)  (GB/s)             (us)  (GB/s)  (GB/s)
     1048576        262144     float     sum      -1    150.0    6.99    6.99       0    110.0    9.53    9.53     N/A
     2097152        524288     float     sum      -1    250.0    8.39    8.39       0    210.0    9.99    9.99     N/A
     4194304       1048576     float     sum      -1    450.0    9.32    9.32       0    410.0   10.23   10.23     N/A
# Out of bounds values : 0 OK
# Avg bus bandwidth    : 8.0
"""
OLD = "\n".join(
    line.replace("    root", "").replace("      -1", "").replace("#wrong", " error")
    for line in NEW.splitlines()
    if "starting" not in line and "Rank" not in line
)


def test_both_layouts_of_nccl_tests(tmp_path):
    path = tmp_path / "out.txt"
    path.write_text(NEW)
    cluster, samples = read_nccl_tests(path)
    assert cluster.workers == 2 and [nbytes for nbytes, _ in samples] == [2**20, 2**21, 2**22]
    assert [seconds for _, seconds in samples] == pytest.approx([110e-6, 210e-6, 410e-6])
    assert cluster.cost().alpha_s == pytest.approx(10e-6)
    assert cluster.cost().beta_s_per_byte * 2**20 == pytest.approx(100e-6)
    path.write_text(OLD)
    assert read_nccl_tests(path, workers=2)[0] == cluster
    with pytest.raises(FileError, match=r"no list of ranks .expected it, or --workers"):
        read_nccl_tests(path)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("hello", "no table of sizes and times"),
        (NEW.replace("all_reduce_perf", "all_gather_perf"), "output of all_gather_perf .expected that of all_reduce"),
        (NEW.partition("     2097152")[0], "fewer than two sizes"),
        (NEW.replace("110.0", "nan").replace("210.0", "1e999"), "fewer than two sizes"),
    ],
)
def test_other_files_get_one_line(tmp_path, text, says):
    path = tmp_path / "out.txt"
    path.write_text(text)
    with pytest.raises(FileError, match=says) as error:
        read_nccl_tests(path)
    assert str(error.value).startswith(str(path)) and str(error.value).isprintable()


def test_calibrate_reads_them(tmp_path, capsys):
    path, cluster = tmp_path / "out.txt", tmp_path / "c.json"
    path.write_text(NEW)
    status, _, err = run(capsys, "calibrate", "--nccl-tests", path, "-o", cluster)
    assert status == 0 and "all-reduce on 2 workers: 10 us + 100 us per MiB" in err
    status, out, _ = run(capsys, "calibrate", "--nccl-tests", path, "--workers", "16", "-o", cluster, "--json")
    assert status == 0 and json.loads(out)["cluster"]["workers"] == json.loads(cluster.read_text())["workers"] == 16
    status, _, err = run(capsys, "calibrate", "--workers", "16", "-o", cluster)
    assert status == 2 and "--workers means nothing without --nccl-tests" in err
