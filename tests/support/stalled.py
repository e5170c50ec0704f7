"""Training between hosts, one of which loses its link: `python -m support.stalled DIRECTORY`, on every rank."""

import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from legato.core.errors import RankError
from legato.core.plan import Message, Plan, Slice
from legato.pytorch import attach

TIMEOUT_S = 60


def main():
    directory = Path(sys.argv[1])
    dist.init_process_group("gloo", timeout=timedelta(seconds=TIMEOUT_S))
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    slices = (Slice(n, 0, 4 * p.numel()) for n, p in reversed(list(model.named_parameters())))
    plan = Plan("each", tuple(Message((s,)) for s in slices), forward_overlap=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    wrapped, optimizer = attach(model, optimizer, plan, flight_dir=directory)
    started = 0.0
    try:
        for i in range(50):
            if i == 5:
                started = time.monotonic()
                if rank == 1:
                    subprocess.run(["ip", "link", "set", "eth0", "down"], check=True)
            optimizer.zero_grad()
            wrapped(torch.randn(4, 64)).sum().backward()
            optimizer.step()
        said = "ended as if nothing had happened"
    except RankError as error:
        said = f"{time.monotonic() - started:.1f} s: {error}"
    (directory / f"{rank}.txt").write_text(said)


if __name__ == "__main__":
    main()
