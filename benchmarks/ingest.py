"""How fast, and with how much memory, a large profiler trace is imported.

    python benchmarks/ingest.py 250 500 1000 2000

writes traces of these sizes in MB (kernels, launches, operators with shapes, flows, as
torch.profiler writes them), imports each trace in a separate process, and prints the
seconds and the peak memory. Steps have the same size in all traces, so the memory must
not grow with the size of the trace. With `--gzip`, traces are compressed. With
`--whole`, the standard library's decoder also reads the same file, for comparison. With
`--folder`, the traces are kept there for the next run.
"""

import argparse
import functools
import gzip
import subprocess
import sys
import tempfile
from pathlib import Path

import msgspec

IMPORT = """
import resource, sys, time
from pathlib import Path
from legato.ingest.kineto.importer import import_kineto
start = time.perf_counter()
job = import_kineto([Path(sys.argv[1])]).workload
print(time.perf_counter() - start, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024, len(job.ops), job.nbytes)
"""
WHOLE = """
import gzip, json, resource, sys, time
start = time.perf_counter()
with (gzip.open if sys.argv[1].endswith(".gz") else open)(sys.argv[1]) as file:
    events = json.load(file)["traceEvents"]
print(time.perf_counter() - start, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024, len(events), 0)
"""


def event(cat, name, tid, ts, dur, **args):
    return {"ph": "X", "cat": cat, "name": name, "pid": 1, "tid": tid, "ts": ts, "dur": dur, "args": args}


def step(number, at, correlation, layers=600):
    """One training step: a forward and a backward kernel a layer, a gradient and an all-reduce a layer."""
    yield event("user_annotation", f"ProfilerStep#{number}", 1, at, 200.0 * layers)
    for i in range(layers):
        t = at + 40 * i + 10
        shape = {"Input Dims": [[64, 1024], [1024, 1024]], "Input type": ["float", "float"]}
        yield event("cpu_op", "aten::linear", 1, t, 30.0, **{"Sequence number": i, "External id": correlation}, **shape)
        yield from kernel(t + 5, 1, t + 20, 18.0, "ampere_sgemm_128x64_tn", correlation + 2 * i)
    for i in reversed(range(layers)):
        t = at + 40 * layers + 100 * (layers - i)
        yield event(
            "cpu_op", "autograd::engine::evaluate_function: AddmmBackward0", 2, t, 40.0, **{"Sequence number": i}
        )
        yield event("cpu_op", "AddmmBackward0", 2, t + 1, 38.0, **{"Sequence number": i})
        yield from kernel(t + 5, 2, t + 20, 36.0, "ampere_sgemm_128x64_nt", correlation + 2 * i + 1)
        name = "torch::autograd::AccumulateGrad"
        yield event("cpu_op", f"autograd::engine::evaluate_function: {name}", 2, t + 50, 40.0)
        yield event("cpu_op", name, 2, t + 55, 5.0, **{"Input Dims": [[1024, 1024]], "Input type": ["float"]})
        sizes = {"Collective name": "allreduce", "In msg nelems": 2**20, "dtype": "Float", "Group size": 8}
        yield from kernel(
            t + 70, 2, t + 75, 60.0, "ncclDevKernel_AllReduce_Sum_f32_RING_LL", correlation + 5000 + i, 20, **sizes
        )
    yield event("user_annotation", "Optimizer.step#SGD.step", 1, at + 160 * layers, 30.0 * layers)
    yield from kernel(at + 160 * layers + 5, 1, at + 160 * layers + 9, 400.0, "multi_tensor_apply", correlation + 9999)


def kernel(host, tid, start, dur, name, correlation, stream=7, **args):
    device = {
        "device": 0,
        "context": 1,
        "stream": stream,
        "registers per thread": 96,
        "grid": [8, 1, 1],
        "block": [512, 1, 1],
    }
    yield event("cuda_runtime", "cudaLaunchKernel", tid, host, 3.0, cbid=211, correlation=correlation)
    yield {"ph": "s", "id": correlation, "pid": 1, "tid": tid, "ts": host, "cat": "ac2g", "name": "ac2g"}
    yield event("kernel", name, stream, start, dur, correlation=correlation, **device, **args)
    yield {"ph": "f", "id": correlation, "pid": 1, "tid": stream, "ts": start, "cat": "ac2g", "name": "ac2g", "bp": "e"}


def write(path, nbytes):
    opener = functools.partial(gzip.open, compresslevel=1) if path.suffix == ".gz" else open
    written, number = 0, 0
    with opener(path, "wb") as file:
        file.write(
            b'{"schemaVersion": 1, "distributedInfo": {"backend": "nccl", "rank": 0, "world_size": 1}, "traceEvents": ['
        )
        while written < nbytes:
            events = map(msgspec.json.encode, step(number, 200_000.0 * number, 10_000 * number))
            block = (b",\n" if number else b"") + b",\n".join(events)
            file.write(block)
            written += len(block)
            number += 1
        file.write(b"]}")


def run(code, path):
    out = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=True).stdout
    return [float(word) for word in out.split()]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("megabytes", type=int, nargs="*", default=[250, 500])
    parser.add_argument("--gzip", action="store_true")
    parser.add_argument("--whole", action="store_true", help="json.load reads it too")
    parser.add_argument("--folder", type=Path, help="where to write the traces and to keep them")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        for megabytes in options.megabytes:
            folder = options.folder or Path(temporary)
            path = folder / f"trace{megabytes}.json{'.gz' if options.gzip else ''}"
            if not path.exists():
                write(path, megabytes * 10**6)
            measure(path, megabytes, options.whole)


def measure(path, megabytes, whole):
    seconds, peak, ops, nbytes = run(IMPORT, path)
    print(f"{megabytes:,} MB: {seconds:.1f} s ({megabytes / seconds:.0f} MB/s), peak {peak / 1e6:,.0f} MB; "
          f"{ops:.0f} ops, {nbytes / 2**20:.0f} MiB of gradients", flush=True)  # fmt: skip
    if whole:
        seconds, peak, events, _ = run(WHOLE, path)
        print(f"    json.load alone: {seconds:.1f} s, peak {peak / 1e6:,.0f} MB; {events:.0f} events", flush=True)


if __name__ == "__main__":
    main()
