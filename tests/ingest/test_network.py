"""The cost of the network, from the all-reduces of a trace and from the output of nccl-tests."""

import json
import re

import pytest
from support.command import run

from legato.core.cluster import Cluster, LinearCost
from legato.core.errors import FileError, InputError
from legato.ingest.network import cluster_of, doubt, read_nccl_tests
from legato.ingest.traced import Imported, Notes, RankMeasure, TracedTransfer


def transfer(nbytes, seconds, waited_s=0.0, kind="all_reduce"):
    return TracedTransfer("t", kind, nbytes, 1.0, 1.0 + seconds + waited_s, "backward", True, waited_s)


def job(transfers, workers=8, waits_known=True):
    measure = RankMeasure(0, "s", 1.0, 0.0, 0.0, 0.0 if waits_known else None, *[0.0] * 8)
    return Imported(None, None, (measure,), Notes(), transfers=tuple(transfers), workers=workers)


SIZES = (10**5, 10**6, 4 * 10**6)


@pytest.mark.parametrize("waits_known", [True, False])
def test_a_line_is_fitted_to_the_all_reduces_of_each_size_without_waiting(waits_known):
    """To the median of three, or to the fastest if it is not known what was waiting."""
    found = [transfer(n, a + 1e-9 * n, waited_s=0.5) for n in SIZES for a in (1e-4, 2e-4, 9e-3)]
    other = [transfer(n, 1e-6, kind="broadcast") for n in SIZES] + [transfer(None, 1e-6)]
    cluster = cluster_of(job([*found, *other], waits_known=waits_known))
    assert cluster.workers == 8
    expected = (2e-4 if waits_known else 1e-4, 1e-9)
    assert (cluster.cost().alpha_s, cluster.cost().beta_s_per_byte) == pytest.approx(expected)


@pytest.mark.parametrize("sizes", [(1000,), (1000, 2000)])
def test_sizes_that_do_not_tell_latency_from_bandwidth(sizes):
    found = job([transfer(n, 1e-3) for n in sizes])
    cost = cluster_of(found).cost()
    assert (cost.alpha_s, cost.beta_s_per_byte) == pytest.approx((0.0, 1e-3 / sizes[-1]))
    assert "all-reduces of sizes that differ enough" in found.notes.missing[0]


def test_what_a_trace_does_not_tell():
    with pytest.raises(InputError, match="no all-reduce whose size is known"):
        cluster_of(job([transfer(None, 1e-3)]))
    with pytest.raises(InputError, match="number of workers"):
        cluster_of(job([transfer(10, 1e-3)], workers=None))
    assert cluster_of(job([transfer(10, 1e-3)], workers=None), 4).workers == 4


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


#: Without its name, as it is where a launcher's own lines are lost.
NAMELESS = NEW.replace("# Collective test starting: all_reduce_perf\n", "")
GATHERED = NAMELESS.replace("   redop    root", "").replace("     sum      -1", "")
SCATTERED = "\n".join(
    re.sub(r"(\d+\.\d+)( +)(\d+\.\d+)(?=  +(0|N/A))", lambda m: f"{m[1]}{m[2]}{float(m[3]) / 2:.2f}", line)
    for line in NAMELESS.splitlines()
)


@pytest.mark.parametrize(
    "prefix",
    [
        "[1,0]<stdout>:",
        "[1,0]<stdout>@host1: ",
        "host-3: ",
        "host 0: ",
        "12: ",
        "gpu07.local:",
        "[default0]:",
        "(w pid=9) ",
        "2025-01-01T10:00:00.123456789Z ",
        "[pod/launcher-0/nccl] ",
    ],
)
def test_lines_of_a_launcher(tmp_path, prefix):
    path = tmp_path / "out.txt"
    path.write_text(NEW)
    expected = read_nccl_tests(path)
    path.write_text("".join(f"{prefix}{line}\n" for line in NEW.splitlines()))
    assert read_nccl_tests(path) == expected


@pytest.mark.parametrize("rates", ["", " algbw busbw", " a b"])
def test_a_table_without_bandwidths(tmp_path, rates):
    """What is no number there tells nothing."""
    path = tmp_path / "out.txt"
    rows = "\n".join(f"{2**k} 1 sum {k}.0{rates}" for k in (10, 11, 12))
    path.write_text(f"#  Rank  0 on a\n#  Rank  1 on b\n#  size  count redop time{rates}\n{rows}\n")
    assert [nbytes for nbytes, _ in read_nccl_tests(path)[1]] == [2**10, 2**11, 2**12]


def test_timestamps(tmp_path):
    path = tmp_path / "out.txt"
    path.write_text(NEW)
    expected = read_nccl_tests(path)
    heading, *rows = NEW.partition("#       size")[2].splitlines()
    stamped = [f"{line}  2025-10-14 09:50:33" if line.lstrip()[:1].isdigit() else line for line in rows]
    path.write_text("\n".join([NEW.partition("#       size")[0] + "#       size" + heading + "  timestamp", *stamped]))
    assert read_nccl_tests(path) == expected


def test_both_layouts_of_nccl_tests(tmp_path):
    path = tmp_path / "out.txt"
    path.write_text(NEW)
    cluster, samples, ranks = read_nccl_tests(path)
    assert cluster.workers == ranks == 2 and [nbytes for nbytes, _ in samples] == [2**20, 2**21, 2**22]
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
        (NEW.replace("all_reduce_perf", "all_gather_perf"), "all_gather_perf .expected the output of all_reduce"),
        (NEW.replace("all_reduce_perf", "sendrecv_perf"), "output of sendrecv_perf"),
        (GATHERED, "a collective that reduces nothing"),
        (SCATTERED, r"busbw is 0.5 x algbw .expected 1, as an all-reduce between 2 ranks has it"),
        (NEW + NEW, "2 runs, with 2 lists of ranks .expected one run"),
        (
            NEW.replace("Rank  1", "Rank  0"),
            "every rank ran alone .expected one run of all: nccl-tests built with MPI=1",
        ),
        (NEW.replace("       0    210.0", "       3    210.0"), "wrong results at 2,097,152 bytes"),
        (NEW.replace("9.99     N/A", "9.99     N/A  FAILED"), "wrong results at 2,097,152 bytes"),
        (NEW.replace("values : 0 OK", "values : 5 FAILED"), "5 wrong results"),
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
    _, _, err = run(capsys, "calibrate", "--nccl-tests", path, "--workers", "16", "-o", cluster)
    assert "measured on 2 ranks, and used as the cost on 16" in err
    status, _, err = run(capsys, "calibrate", "--workers", "16", "-o", cluster)
    assert status == 2 and "--workers does not apply without --nccl-tests" in err


def test_times_that_no_line_fits_are_followed_and_plans_say_how_far_a_cost_is_off(tmp_path, capsys):
    path, cluster, job = tmp_path / "out.txt", tmp_path / "c.json", tmp_path / "w.json"
    path.write_text(NEW.replace("110.0", "600.0").replace("410.0", "1410.0"))
    status, _, err = run(capsys, "calibrate", "--nccl-tests", path, "-o", cluster)
    assert status == 0 and "1.41 ms for 1 MiB to 4 MiB, between 3 measured sizes, off by up to 93%" in err, err
    run(capsys, "workload", "alexnet-v2", "-o", job)
    status, out, _ = run(capsys, "plan", job, "--cluster", cluster)
    assert status == 0 and "off by up to 93% at measured sizes" in out
    path.write_text(NEW.replace("210.0", "390.0"))
    status, _, err = run(capsys, "calibrate", "--nccl-tests", path, "-o", cluster)
    assert status == 0 and "between 3 measured sizes" in err and "off by" not in err and err.count("fit    0%") == 3


@pytest.mark.parametrize(
    ("workers", "cost", "says"),
    [
        (2, LinearCost(5.7e-3, 1e-10), "5.7 ms however small it is"),
        (2, LinearCost(0.0, 1e-10, floor_s=5.7e-3), "5.7 ms however small it is"),
        (8, LinearCost(5.7e-3, 1e-10), "5.7 ms however small it is"),
        (2, LinearCost(0.0, 1e-6), "1.05 s per MiB"),
        (2, LinearCost(4e-4, 1e-8), ""),
        (64, LinearCost(5.7e-3, 1e-8), ""),
        (1, LinearCost(5.7e-3, 1e-6), ""),
    ],
)
def test_a_cost_that_no_network_has_is_a_wait(workers, cost, says):
    found = doubt(Cluster(workers, {"traced": cost}))
    assert (says in found and "waits for late ranks or for the host" in found) if says else found == ""
