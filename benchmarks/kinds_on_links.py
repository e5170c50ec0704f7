"""Steps of whole jobs whose kinds of communication share links: measured, and simulated link by link.

    python benchmarks/kinds_on_links.py [--bandwidth 300Mbit] [--rounds 5] [-o kinds.json]

Four hosts (Linux namespaces with links of that bandwidth) run the programs of small jobs. Instead of computing, a host
sleeps. The groups of a job exchange the job's bytes with gloo, one communication after another in each group. So
communications of different groups share the hosts' links, as in `legato simulate` of a job by flows. Before the jobs,
links and latencies are measured on idle links. The table has the median over the rounds and two predictions: with
shared links, and with a separate network for each communication (by formulas).
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import msgspec

from legato.core.cluster import LinearCost
from legato.core.job import Framework, Job, LanguageModel, Machine, Mesh
from legato.core.program import Communication, Compute, Lane, Program, Start, Wait
from legato.core.quantities import parse_bandwidth
from legato.core.units import format_seconds
from legato.lab.testbed.launch import run_workers
from legato.whole_jobs import traced
from legato.whole_jobs.flow.programs import program
from legato.whole_jobs.flow.step import network_of, simulate_program

WORKERS = 4
DENSE = LanguageModel(4, 512, 8, 8, 64, 2048, 2048, 512)
MIXTURE = msgspec.structs.replace(DENSE, experts=4, active_experts=2, expert_intermediate=512)
HIDDEN = Framework(hidden=("tensor", "context", "expert", "pipeline", "data"))


def machine(card_bytes_per_s: float, latency_s: float, hop_s: float) -> Machine:
    """A host with one GPU, so slow that it computes about as long as it sends."""
    return Machine(
        "host", 3e11, 1e12, 2**34, 1e12, card_bytes_per_s, 0.5, 0.5, gpus_per_host=1, link_share=1.0, card_share=1.0,
        latency_s=0.0, network_latency_s=latency_s, hop_s=hop_s,
    )  # fmt: skip


def jobs(host: Machine) -> dict[str, Job]:
    """Small jobs, by name; in all but the last two, kinds of communication share links."""
    shapes = {
        "tensor x data": (Mesh(tensor=2, data=2), DENSE, {}),
        "tensor x data, sequence parallel, sharded optimizer": (
            Mesh(tensor=2, data=2), DENSE, {"sequence_parallel": True, "shard": "optimizer"}
        ),
        "pipeline x data": (Mesh(pipeline=2, data=2), DENSE, {}),
        "pipeline x data, sharded optimizer": (Mesh(pipeline=2, data=2), DENSE, {"shard": "optimizer"}),
        "tensor x pipeline": (Mesh(tensor=2, pipeline=2), DENSE, {}),
        "context x data": (Mesh(context=2, data=2), DENSE, {}),
        "expert x data": (Mesh(data=4, expert=2), MIXTURE, {}),
        "data": (Mesh(data=4), DENSE, {}),
        "pipeline": (Mesh(pipeline=4), DENSE, {}),
    }  # fmt: skip
    return {
        name: Job(name, model, mesh, HIDDEN, host, microbatches=mesh.pipeline, microbatch=4, **more)
        for name, (mesh, model, more) in shapes.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bandwidth", default="300Mbit")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("-o", "--output", type=Path, default=Path("kinds.json"))
    chosen = parser.parse_args()
    os.environ["PYTHONPATH"] = str(Path(__file__).parent)  # where the workers find this file
    output = chosen.output.absolute()
    with tempfile.TemporaryDirectory() as folder:
        run_workers(
            [Path(__file__).stem, str(chosen.rounds), str(output)],
            WORKERS,
            Path(folder) / "log",
            lambda *_: None,
            parse_bandwidth(chosen.bandwidth),
        )
    found = json.loads(output.read_text())
    print(
        f"links {8e-6 * found['bytes_per_s']:.0f} Mbit/s, latency {format_seconds(found['latency_s'])} "
        f"and {format_seconds(found['hop_s'])} for each further host (measured, alone)"
    )
    for row in found["rows"]:
        print(
            f"{row['name']:52} measured {format_seconds(row['measured_s']):>7}, shared links "
            f"{format_seconds(row['shared_s']):>7} ({row['shared_s'] / row['measured_s'] - 1:+.1%}), alone "
            f"{format_seconds(row['alone_s']):>7} ({row['alone_s'] / row['measured_s'] - 1:+.1%})"
        )
    for kind in ("shared_s", "alone_s"):
        errors = [abs(row[kind] / row["measured_s"] - 1) for row in found["rows"]]
        print(f"{kind}: {statistics.median(errors):.1%} (median), {max(errors):.1%} (worst)")


def worker(rounds: int, output: Path) -> None:
    """One rank; rank 0 writes the rows."""
    import torch.distributed as dist

    from legato.lab.testbed.rank import gloo_rank

    with gloo_rank():
        rank, rows = dist.get_rank(), []
        host = measured_machine()
        for name, job in jobs(host).items():
            made = program(job)
            carried = Carried(made, rank)
            seconds = [carried.step() for _ in range(rounds + 1)][1:]
            carried.close()
            network = network_of(host, WORKERS)
            rows.append(
                {
                    "name": name,
                    "measured_s": statistics.median(seconds),
                    "shared_s": simulate_program(made, host, network).seconds,
                    "alone_s": traced.predict(made, host).seconds,
                }
            )
        if rank == 0:
            links = {"bytes_per_s": host.card_bytes_per_s, "latency_s": host.network_latency_s, "hop_s": host.hop_s}
            output.write_text(json.dumps({**links, "rows": rows}))


def measured_machine() -> Machine:
    """Links and latencies, from all-reduces of two and of four workers alone, one after another."""
    import torch.distributed as dist

    def seconds(groups: tuple[tuple[int, ...], ...], nbytes: float, times: int) -> float:
        one = Communication("data", "all_reduce", groups, nbytes, times)
        lane = Lane(tuple(range(WORKERS)), (Start(0), Wait(0)))
        carried = Carried(Program("alone", (lane,), (one,)), dist.get_rank())
        found = [carried.step() / times for _ in range(6)][1:]
        carried.close()
        return statistics.median(found)

    def line(size: int) -> LinearCost:
        groups = tuple(tuple(range(first, first + size)) for first in range(0, WORKERS, size))
        points = [(nbytes, seconds(groups, nbytes, times)) for nbytes, times in ((1e6, 16), (4e6, 4), (8e6, 2))]
        return LinearCost.fit([(2 * (size - 1) / size * nbytes, s) for nbytes, s in points])

    pair, every = line(2), line(WORKERS)
    return machine(1 / every.beta_s_per_byte, pair.alpha_s, max(0.0, every.alpha_s - pair.alpha_s) / (WORKERS - 2))


class Carried:
    """A program's lane on this rank, with a thread for each of its groups, in which communications run one by one."""

    def __init__(self, made: Program, rank: int) -> None:
        import torch
        import torch.distributed as dist

        self.made, self.rank = made, rank
        self.actions = next(lane.actions for lane in made.lanes if rank in lane.workers)
        self.queues: dict[Any, queue.SimpleQueue[Any]] = {}
        self.group: dict[Any, tuple[Any, tuple[int, ...]]] = {}
        self.done = [threading.Event() for _ in made.communications]
        for one in made.communications:
            if (key := _order(one)) in self.group:
                continue
            for members in one.groups:
                group = dist.new_group(list(members))
                if rank in members:
                    self.group[key] = group, members
                    size = len(members)
                    dist.all_to_all_single(torch.empty(size), torch.zeros(size), group=group)  # connects them
            self.group.setdefault(key, (None, ()))
        self.buffers = [
            torch.zeros(self._numel(one), dtype=torch.float32) if rank in self._members(one) else None
            for one in made.communications
        ]
        self.threads = []
        for key, (group, _) in self.group.items():
            if group is not None:
                self.queues[key] = queue.SimpleQueue()
                self.threads.append(threading.Thread(target=self._serve, args=(key,), daemon=True))
                self.threads[-1].start()

    def _members(self, one: Communication) -> tuple[int, ...]:
        return self.group[_order(one)][1]

    def _numel(self, one: Communication) -> int:
        size = len(one.groups[0])
        return max(1, round(one.nbytes / 4 / size)) * size

    def step(self) -> float:
        """The seconds of a step, of the slowest rank."""
        import torch
        import torch.distributed as dist

        for event in self.done:
            event.clear()
        dist.barrier()
        start = now = time.perf_counter()
        for number, one in enumerate(self.made.communications):
            if one.operation == "send" and self.rank in self._members(one) and self._members(one)[1] == self.rank:
                self.queues[_order(one)].put(number)
        for action in self.actions:
            if isinstance(action, Compute):
                now = max(now, time.perf_counter()) + action.seconds
                time.sleep(max(0.0, now - time.perf_counter()))
            elif isinstance(action, Start):
                self.queues[_order(self.made.communications[action.communication])].put(action.communication)
            else:
                assert self.done[action.communication].wait(60)
                now = time.perf_counter()
        took = torch.tensor(time.perf_counter() - start, dtype=torch.float64)
        dist.all_reduce(took, dist.ReduceOp.MAX)
        return took.item()

    def _serve(self, key: Any) -> None:
        from datetime import timedelta

        import torch

        from legato.pytorch.network.collectives import Collectives

        gloo = self.group[key][0]._get_backend(torch.device("cpu"))
        steps = Collectives(gloo, timedelta(seconds=60))
        while (number := self.queues[key].get()) is not None:
            for _ in range(self.made.communications[number].times):
                self._carry_out(number, gloo, steps)
            self.done[number].set()

    def _carry_out(self, number: int, gloo: Any, steps: Any) -> None:
        import torch.distributed as dist

        one, buffer = self.made.communications[number], self.buffers[number]
        group, members = self.group[_order(one)]
        if one.operation == "send":
            sender, receiver = (dist.get_group_rank(group, member) for member in members)
            mine = members[0] == self.rank
            (gloo.send([buffer], receiver, number) if mine else gloo.recv([buffer], sender, number)).wait()
        elif one.operation == "all_to_all":
            self._exchange(buffer, gloo, number)
        else:
            steps.carry_out(buffer, one.operation, "ring", 1)

    def _exchange(self, buffer: Any, gloo: Any, number: int) -> None:
        """An all-to-all whose parts are all sent at once; gloo's own one takes up to twice as long."""
        import torch

        size, own = gloo.size(), gloo.rank()
        given, taken = buffer.chunk(size), torch.empty_like(buffer).chunk(size)
        peers = [peer for peer in range(size) if peer != own]
        works = [gloo.recv([taken[peer]], peer, number) for peer in peers]
        works += [gloo.send([given[peer]], peer, number) for peer in peers]
        for work in works:
            work.wait()

    def close(self) -> None:
        for each in self.queues.values():
            each.put(None)
        for thread in self.threads:
            thread.join()


def _order(one: Communication) -> Any:
    """Communications with the same one run in the order of their starts."""
    return one.groups, one.operation == "send"


if __name__ == "__main__":
    if "RANK" in os.environ:
        worker(int(sys.argv[1]), Path(sys.argv[2]))
    else:
        main()
