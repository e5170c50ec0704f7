"""Train with checkpoints, so that torchrun can restart all ranks when one of them dies.

    torchrun --nproc-per-node 2 --max-restarts 3 examples/elastic.py --checkpoint run.pt

After a restart all ranks continue from the last checkpoint, with the same batches as
in an undisturbed run. `--die-at 7` kills a rank in step 7 of the first start. The
number of ranks may differ between starts.
"""

import argparse
import os
import signal

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

import legato

STEPS = 20
EVERY = 5


def batch(step, rank):
    """The data of one step. The batch depends only on the step and the rank, so it is the same after a restart."""
    random = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(8, 32, generator=random), torch.randint(0, 10, (8,), generator=random)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--checkpoint", required=True)
    parser.add_argument("--die-at", type=int)
    options = parser.parse_args()

    # torchrun keeps one store over all restarts. Each restart needs its own prefix, or ranks wait for dead ones.
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    store = dist.PrefixStore(f"restart {os.environ['TORCHELASTIC_RESTART_COUNT']}", store)
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo", store=store, rank=rank, world_size=int(os.environ["WORLD_SIZE"]))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    first = 0
    if os.path.exists(options.checkpoint):
        saved = torch.load(options.checkpoint)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        first = saved["step"]
    model, optimizer = legato.distribute(nn.parallel.DistributedDataParallel(model), optimizer)

    for step in range(first, STEPS):
        if step == options.die_at and rank == dist.get_world_size() - 1 and not first:
            os.kill(os.getpid(), signal.SIGKILL)
        x, y = batch(step, rank)
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if (step + 1) % EVERY == 0:
            if rank == 0:
                state = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict(), "step": step + 1}
                torch.save(state, options.checkpoint + ".new")
                os.replace(options.checkpoint + ".new", options.checkpoint)  # never leaves half a file
            dist.barrier()
    if rank == 0:
        print(f"steps {first} to {STEPS} done on {dist.get_world_size()} ranks, loss {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
