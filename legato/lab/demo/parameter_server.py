"""One rank of `legato demo --servers`, which torchrun starts.

Workers and servers together capture the model and calibrate the network. The same model then trains with each order of
pulls from the same initial weights, in alternating blocks. The trained weights are compared with those that DDP trains.
"""

from __future__ import annotations

import functools
import statistics
import sys
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from legato.core import files
from legato.core.cluster import Cluster
from legato.core.plan import Plan
from legato.core.workload import Workload
from legato.lab.demo.models import MODELS
from legato.lab.demo.result import SERVER_STAGES, ServerResult, ServerRow
from legato.lab.servers import Iteration, ServedModel, parameter_servers
from legato.lab.testbed.launch import Advance
from legato.lab.testbed.rank import gloo_rank
from legato.pytorch.network.agreement import broadcast_bytes
from legato.pytorch.network.calibrate import calibrate, sizes_up_to
from legato.pytorch.recording.capture import capture
from legato.schedule.compare import compare

SEED = 20
BLOCK = 6  # iterations of an order before the next order runs; the first iteration is not timed


def main(model: str, steps: int, servers: int, folder: Path) -> None:
    """Run the demo of parameter servers for one model on this rank; rank 0 writes the result into `folder`."""
    with gloo_rank() as advance:
        _run(model, steps, servers, folder, advance)


def _run(model: str, steps: int, servers: int, folder: Path, advance: Advance) -> None:
    workload, cluster = _measured(model, servers, advance)
    orders: dict[str, Plan | str] = {"random": "random"}
    predicted = {}
    if dist.get_rank() == 0:
        found = compare(workload, cluster, progress=functools.partial(advance, SERVER_STAGES[2]))
        orders |= {c.plan.scheduler: c.plan for c in found if c.plan.carrier != "unordered"}
        predicted = {c.plan.scheduler: c.iteration_s for c in found}
    names = broadcast_bytes(",".join(orders).encode(), dist.group.WORLD).decode().split(",")
    for name in names[1:]:
        mine = orders.get(name)
        content = broadcast_bytes(files.encode(mine) if isinstance(mine, Plan) else b"", dist.group.WORLD)
        orders[name] = files.decode(content, Plan, "the plan of rank 0")
    record: dict[str, list[Iteration]] = {name: [] for name in names}
    rounds = max(1, steps // BLOCK)
    finals: dict[str, dict[str, torch.Tensor]] = {}
    for k in range(rounds * len(names)):
        name = names[k % len(names)]
        trained = _train(model, servers, orders[name], seed=k)
        if trained is not None:
            record[name] += trained[0]
            finals[name] = trained[1]
        advance(SERVER_STAGES[3], k + 1, rounds * len(names))
    reference = _under_ddp(model, servers)
    if dist.get_rank() == 0 and reference is not None:
        rows = [_row(name, record[name], predicted[name], _difference(reference, finals[name])) for name in names]
        result = ServerResult(model, workload, dist.get_world_size() - servers, servers, rows)
        files.write_text(folder / "result.json", msgspec.json.encode(result).decode())


def _measured(name: str, servers: int, advance: Advance) -> tuple[Workload, Cluster]:
    torch.manual_seed(SEED)
    training = MODELS[name]()
    workload = capture(
        training.model,
        training.optimizer,
        functools.partial(training.loss, training.model),
        name=name,
        batch_size=training.batch_size,
        progress=functools.partial(advance, SERVER_STAGES[0]),
    )
    sizes = sizes_up_to(workload.nbytes)
    cluster = calibrate(sizes=sizes, progress=functools.partial(advance, SERVER_STAGES[1])).cluster
    workers = dist.get_world_size() - servers
    return workload, msgspec.structs.replace(cluster, workers=workers, servers=servers)


def _train(name: str, servers: int, plan: Plan | str, seed: int) -> Any:
    """Train a block of steps; return (iterations, trained weights) on workers, and None on servers."""
    torch.manual_seed(SEED)
    training = MODELS[name]()

    def train(model: ServedModel, optimizer: torch.optim.Optimizer) -> Any:
        torch.manual_seed(SEED + model.worker)
        with model.measure() as record:
            for _ in range(BLOCK + 1):
                optimizer.zero_grad()
                loss: Any = training.loss(model)
                loss.backward()
                optimizer.step()
        return record[1:], _weights(model.module)

    return parameter_servers(training.model, training.optimizer, train, servers=servers, plan=plan, seed=seed)


def _under_ddp(name: str, servers: int) -> dict[str, torch.Tensor] | None:
    """Train the same steps with DDP; return the weights on workers, and None on servers."""
    group = dist.new_group(range(dist.get_world_size() - servers))
    torch.manual_seed(SEED)
    training = MODELS[name]()
    if dist.get_rank() >= dist.get_world_size() - servers:
        return None
    model = torch.nn.parallel.DistributedDataParallel(training.model, process_group=group)
    torch.manual_seed(SEED + dist.get_rank())
    for _ in range(BLOCK + 1):
        training.optimizer.zero_grad()
        loss: Any = training.loss(model)
        loss.backward()
        training.optimizer.step()
    return _weights(training.model)


def _weights(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def _difference(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    """Return the largest difference between two sets of weights, relative to each parameter's largest value."""
    return max(
        float((one[k].double() - other[k].double()).abs().max() / one[k].double().abs().max().clamp(min=1e-30))
        for k in one
    )


def _row(name: str, record: list[Iteration], predicted_s: float, difference: float) -> ServerRow:
    transfers = sum(iteration.transfers for iteration in record)
    return ServerRow(
        order=name,
        iteration_s=statistics.median(iteration.seconds for iteration in record),
        waited_s=statistics.median(iteration.waited_s for iteration in record),
        predicted_s=predicted_s,
        out_of_order=sum(iteration.out_of_order for iteration in record) / max(1, transfers),
        iterations=len(record),
        max_relative_difference=difference,
    )


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]))
