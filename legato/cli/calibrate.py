"""`legato calibrate`"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from legato.cli.axes import option
from legato.cli.options import Json, keep_apart, quantity, setting
from legato.cli.output import note, print_json, progress
from legato.core import files
from legato.core.errors import InputError
from legato.core.quantities import parse_bytes
from legato.core.text import count, percent
from legato.core.units import format_bytes, format_seconds


@dataclass(frozen=True)
class Measured:
    """The options that say what is measured."""

    backend: str = setting("gloo", "Backend of torch.distributed, such as gloo or nccl.")
    collectives: str = setting(
        "",
        "Collectives to measure over gloo in addition to the backend's own, such as shuffle,ring,halving-doubling.",
        show_default="none",
    )
    depths: str = setting("1,4", "Numbers of chunks in which the collectives of --collectives send a message.")
    max_message: str = setting("64MiB", "Size of the largest message to measure, at least 1 MiB.", metavar="BYTES")
    training: str | None = setting(
        None,
        "Also measure how much messages and this training step's computation slow each other down on the CPU;"
        " FILE.py:FUNCTION is as in legato capture.",
        metavar="FILE.py:FUNCTION",
    )


def calibrate(
    output: Annotated[Path, typer.Option("--output", "-o", metavar="C.json", help="Write the cluster to this file.")],
    *,
    what: Measured,
    nccl_tests: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Read this output of nccl-tests' all_reduce_perf instead of measuring."),
    ] = None,
    workers: Annotated[
        int | None,
        option("workers", show_default="the number of ranks in FILE", min=2, rich_help_panel=None),
    ] = None,
    json: Json = False,
) -> None:
    """Measure the cost of an all-reduce between the processes of this job.

    Start this command with torchrun, on the same machines and with the same number of processes as the training. With
    --collectives, more collectives are measured, and plans can choose one for every message. If training runs on the
    CPU, use --training: then predictions include how much messages slow down computation, and how much computation
    slows down messages. --nccl-tests needs neither torchrun nor PyTorch.

    Example: [bold]torchrun --nproc-per-node 2 --no-python legato calibrate -o cluster.json[/]
    """
    if nccl_tests is not None:
        keep_apart([nccl_tests], output=output)
        _read(nccl_tests, workers, output, json)
        return
    if workers is not None:
        raise InputError("--workers does not apply without --nccl-tests")
    import os

    import torch.distributed as dist

    from legato.pytorch.network.calibrate import calibrate as run
    from legato.pytorch.network.calibrate import sizes_up_to

    if "RANK" not in os.environ:
        raise InputError("calibrate measures between processes: start it under torchrun (see legato calibrate --help)")
    names, chunks = [name.strip() for name in what.collectives.split(",") if name.strip()], _numbers(what.depths)
    sizes = sizes_up_to(quantity("max-message", what.max_message, parse_bytes))
    compute = None if what.training is None else _passes(what.training)
    dist.init_process_group(what.backend)
    try:
        if dist.get_rank() == 0:
            with progress("measuring all-reduce") as advance:
                found = run(sizes=sizes, collectives=names, depths=chunks, compute=compute, progress=advance)
        else:
            found = run(sizes=sizes, collectives=names, depths=chunks, compute=compute)
        if dist.get_rank() == 0:
            files.write(output, found.cluster)
            _show(found, output, json)
    finally:
        dist.destroy_process_group()


def _passes(training: str) -> Callable[[], None]:
    """Return a function that runs the forward and backward pass of the training step in a file."""
    from legato.pytorch.recording.load import load_training

    _, optimizer, loss = load_training(training)

    def compute() -> None:
        optimizer.zero_grad()
        total: Any = loss()
        total.backward()

    return compute


def _read(path: Path, workers: int | None, output: Path, json: bool) -> None:
    from legato.ingest.network import read_nccl_tests

    cluster, samples, ranks = read_nccl_tests(path, workers)
    if ranks and ranks != cluster.workers:
        note(f"{path}: measured on {ranks} ranks, and used as the cost on {cluster.workers}")
    files.write(output, cluster)
    if json:
        print_json({"cluster": cluster, "samples": [{"nbytes": n, "seconds": s} for n, s in samples]})
        return
    cost = cluster.cost()
    for nbytes, seconds in samples:
        error = cost.cost(nbytes) / seconds - 1
        note(f"{format_bytes(nbytes):>10}  {format_seconds(seconds):>10}  fit {percent(error, 0, signed=True):>5}")
    note(f"all-reduce on {count(cluster.workers, 'worker')}: {cost} -> {output}")


def _numbers(text: str) -> list[int]:
    try:
        return [int(number) for number in text.split(",")]
    except ValueError:
        raise InputError(f"--depths: {text!r} (expected whole numbers with commas between them)") from None


def _show(found: object, output: Path, json: bool) -> None:
    from legato.pytorch.network.calibrate import Calibration

    assert isinstance(found, Calibration)
    cost = found.cluster.cost()
    if json:
        samples = [
            {
                "collective": s.collective,
                "depth": s.depth,
                "nbytes": s.nbytes,
                "seconds": s.seconds,
                "fitted_s": s.fitted_s,
            }
            for s in found.samples
        ]
        errors = {"median_error": found.median_error, "worst_error": found.worst_error}
        print_json({"cluster": found.cluster, "samples": samples, **errors})
        return
    for s in found.samples:
        way = s.collective if s.depth == 1 else f"{s.collective} in {s.depth} chunks"
        error = percent(s.error, 0, signed=True)
        note(f"{format_bytes(s.nbytes):>10}  {format_seconds(s.seconds):>10}  fit {error:>5}  {way}")
    note(
        f"{found.cluster.default_collective} on {count(found.cluster.workers, 'worker')}: {cost}; "
        f"the fit is off by {found.median_error:.0%} "
        f"(median), {found.worst_error:.0%} (worst) -> {output}"
    )
    if found.cluster.send_s is not None:
        note(f"a send keeps its sender busy for {format_seconds(found.cluster.send_s)}")
    if found.compute_s:
        note(f"{found.cluster.contention}")
