"""Ranks that fail, as real processes: `python -m support.faults DIRECTORY CASE...` runs all cases at once.

Three ranks each. What a rank says goes to DIRECTORY/CASE/RANK.txt, its exit status and seconds to RANK.json. torch
is imported once; each rank is a fork of that, and ends like any script: by an uncaught exception, `atexit` and so on.
"""

import json
import os
import signal
import sys
import time
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from unittest.mock import patch

from support import PATIENCE_S

RANKS = 3
#: Ranks that nobody answers wait so long.
TIMEOUT_S = 60
FAULT_AT = 5


def training(case, directory):
    """Twenty steps; rank 1 (rank 0 where the case says so) does something bad in one of them."""
    import torch
    import torch.distributed as dist

    from legato.pytorch.network.watchdog import Watchdog

    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=PATIENCE_S if case == "ctrl_c" else TIMEOUT_S))
    with patch.object(Watchdog, "_done", _noting(Watchdog._done, directory)) if case == "ctrl_c" else nullcontext():
        _train(case, directory)


def _noting(done, directory):
    """Watchdog._done that notes, while another rank sleeps, that this one has waited for a second."""

    def noting(self, work):
        ended = done(self, work)
        if not ended and (directory / "sleeping").exists():
            (directory / f"waiting-{self.rank}").touch()
        return ended

    return noting


def _train(case, directory):
    import torch
    import torch.distributed as dist
    from torch.nn import functional as F

    import legato
    from legato.pytorch import attach, attachment
    from support.training import Dense, random_plan, sgd

    torch.manual_seed(7)
    model = Dense()
    if case.endswith("with_buffers"):
        model.register_buffer("seen", torch.zeros(1))  # DDP broadcasts it in each forward pass
    if case == "killed_before_distribute" and dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    debug = {"skips_a_step_in_debug_mode": "order", "nan_in_debug_mode": "finite"}.get(case, False)
    plan = random_plan(model, 3)
    options = {"debug": debug, "flight_dir": directory, "shard": "optimizer" if "sharded" in case else "none"}
    if case.endswith("while_observed"):
        wrapped, optimizer = legato.distribute(model, sgd(model.parameters()), flight_dir=directory)
    else:
        wrapped, optimizer = attach(model, sgd(model.parameters()), plan, **options)
    if case == "killed_in_a_tournament":
        attachment(wrapped).compete([plan, random_plan(model, 4)])
    bad = dist.get_rank() == (0 if case == "killed_rank_0" else 1)
    generator = torch.Generator().manual_seed(dist.get_rank())

    def load(i):
        if bad and i == FAULT_AT and case == "raises_in_the_loader":
            raise ValueError("no such file")
        if bad and i == FAULT_AT and case in ("sleeps_in_the_loader", "ctrl_c"):
            (directory / "sleeping").touch()
            time.sleep(PATIENCE_S)
        return model.batch(generator)

    def raising(*_):
        raise ValueError("not today")

    for i in range(20):
        x, y = load(i)
        if bad and i == FAULT_AT:
            if case.startswith("killed"):
                os.kill(os.getpid(), signal.SIGKILL)
            if case == "exits":
                sys.exit(3)
            if case == "stopped":
                os.kill(os.getpid(), signal.SIGSTOP)
            if case.startswith("raises_in_forward"):
                model.second.register_forward_pre_hook(raising)
            if case == "raises_in_backward":
                model.second.weight.register_hook(raising)
            if case == "nan_in_debug_mode":
                model.third.weight.register_hook(lambda g: g * float("nan"))
            if case == "gathers_a_sharded_state_alone":
                optimizer.state_dict()
            if case.startswith("skips_a_step"):
                wrapped(x)
                continue
        optimizer.zero_grad()
        F.cross_entropy(wrapped(x), y).backward()
        optimizer.step()
    attachment(wrapped).flush()


def start(case, rank, port, directory):
    """Fork a rank; returns its process id. The child does not return."""
    pid = os.fork()
    if pid:
        return pid
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job's tests ignore it
    os.environ.update(
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(RANKS), LEGATO_DEBUG=""
    )
    output = os.open(directory / f"{rank}.txt", os.O_CREAT | os.O_WRONLY)
    os.dup2(output, 1)
    os.dup2(output, 2)
    training(case, directory)
    sys.exit(0)


def main():
    import torch._dynamo  # noqa: F401  (optimizers do, at their first step)

    import support.training  # noqa: F401  (imports torch, once for all)
    from support.ranks import free_port

    root, cases = Path(sys.argv[1]), sys.argv[2:]
    running, began = {}, time.monotonic()
    for case in cases:
        directory = root / case
        directory.mkdir(parents=True)
        port = free_port()
        for rank in range(RANKS):
            running[start(case, rank, port, directory)] = (case, rank)
    waited_for = {root / "ctrl_c" / name for name in ("sleeping", "waiting-0", "waiting-2")}
    while running:
        after = time.monotonic() - began
        if waited_for and all(path.exists() for path in waited_for):
            waited_for = None  # Ctrl-C reaches every process of a terminal
            for pid, (case, _) in running.items():
                if case == "ctrl_c":
                    os.kill(pid, signal.SIGINT)
        others = {case for case, rank in running.values() if rank != 1}
        for pid, (case, _) in running.items():
            if after > PATIENCE_S or (case in ("stopped", "sleeps_in_the_loader") and case not in others):
                os.kill(pid, signal.SIGKILL)
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid:
            case, rank = running.pop(pid)
            said = {"status": os.waitstatus_to_exitcode(status), "seconds": after}
            (root / case / f"{rank}.json").write_text(json.dumps(said))
        time.sleep(0.05)


if __name__ == "__main__":
    main()
