"""Real worker processes for tests: started once, given one function after another.

They are forks of a server that has imported torch, so a new one costs next to nothing. Where there is a GPU they are
started one by one: CUDA does not survive a fork.
"""

import contextlib
import functools
import importlib
import inspect
import multiprocessing
import multiprocessing.connection
import multiprocessing.forkserver
import os
import random
import runpy
import signal
import socket
import sys
import time
import traceback
from pathlib import Path

from support import PATIENCE_S, environment

#: How long the other ranks may take when one has failed: as it may, they have to notice it themselves.
AFTER_A_FAILURE_S = min(PATIENCE_S, 180)


def on_ranks(size):
    """Make a test of a body that is run on `size` ranks; `size` may be a function of the test's arguments.

    Arguments and fixtures travel to the ranks, so they have to be picklable. The test fails where the body does.
    """

    def decorate(body):
        names = list(inspect.signature(body).parameters)

        @functools.wraps(body)
        def test(ranks_of, **given):
            ranks = ranks_of(size(**given) if callable(size) else size)
            ranks.run(test, *(given[name] for name in names))

        parameters = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in ("ranks_of", *names)]
        test.__signature__ = inspect.Signature(parameters)
        test.body = body
        return test

    return decorate


def gathered(value):
    """`value` of every rank, by rank; for bodies that run on ranks."""
    import torch.distributed as dist

    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def free_port() -> int:
    """A port of this machine, below those that the system gives to whoever asks for any: nobody takes it meanwhile."""
    while True:
        port = random.SystemRandom().randrange(15_000, 32_768)
        with socket.socket() as s, contextlib.suppress(OSError):
            s.bind(("127.0.0.1", port))
            return port


def _serve(rank, size, port, backend, pipe):
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = "127.0.0.1", str(port)
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    if backend == "late":
        importlib.import_module("support.late.device")
    dist.init_process_group(backend, rank=rank, world_size=size)
    while True:
        try:
            task = pipe.recv()
            if task is None:
                break
            module, name, args = task
            torch.manual_seed(1234)
            function = getattr(importlib.import_module(module), name)
            pipe.send((True, getattr(function, "body", function)(*args)))
        except BaseException as error:  # of pytest, too: what `raises` misses is no Exception
            pipe.send((False, f"{type(error).__name__}: {error}\n{traceback.format_exc()}"))
    dist.destroy_process_group()


def _context():
    """How to start a rank."""
    import torch

    if torch.cuda.is_available():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["support.preloaded"])
    before = dict(os.environ)
    os.environ.update(environment(OMP_NUM_THREADS="1"))
    try:
        multiprocessing.forkserver.ensure_running()
    finally:
        os.environ.clear()
        os.environ.update(before)
    return context


def _script(arguments, folder, output, variables):
    with open(output, "w") as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
    os.chdir(folder)
    os.environ.update(variables)
    first, *sys.argv[1:] = arguments
    if first == "-c":
        code = sys.argv.pop(1)
        sys.argv[0] = first
        exec(compile(code, "<string>", "exec"), {"__name__": "__main__"})
    else:
        sys.argv[0] = first
        sys.path.insert(0, str(Path(first).parent))
        runpy.run_path(first, run_name="__main__")


def run_script(arguments, folder, ranks=1, **variables):
    """What `python ARGUMENTS` (a file, or `-c CODE`) prints on all ranks, started as torchrun starts them.

    Fails the test if a rank fails.
    """
    import torch.distributed as dist

    context, port = _context(), free_port()
    store = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    outputs = [Path(folder, f"output of rank {rank}") for rank in range(ranks)]
    processes = []
    for rank, output in enumerate(outputs):
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "GROUP_RANK": 0}
        place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TORCHELASTIC_RUN_ID": "tests"}
        place |= {"TORCHELASTIC_RESTART_COUNT": 0, "TORCHELASTIC_USE_AGENT_STORE": True, **variables}
        place = {name: str(value) for name, value in place.items()}
        processes.append(context.Process(target=_script, args=(arguments, str(folder), output, place)))
        processes[-1].start()
    for process in processes:
        process.join(PATIENCE_S)
        process.kill()
    said = "".join(output.read_text() for output in outputs if output.exists())
    for process in processes:
        process.join()
        assert process.exitcode == 0, said
    del store  # as torchrun does, it outlives the ranks
    return said


class Ranks:
    """`size` processes with a process group between them."""

    def __init__(self, size, backend="gloo"):
        self.size, self._backend = size, backend
        if backend == "late":
            importlib.import_module("support.late").built()
        self._start()

    def _start(self):
        context = _context()
        port = free_port()
        self._pipes, self._processes, self._tasks = [], [], 0
        for rank in range(self.size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, self.size, port, self._backend, theirs), daemon=True)
            process.start()
            self._pipes.append(ours)
            self._processes.append(process)

    def outcomes(self, function, *args):
        """[(ok, result or error text)] of `function(*args)` on every rank; if one hangs or dies, all are replaced."""
        self.begin(function, *args)
        found, until = {}, time.monotonic() + PATIENCE_S
        silent = {pipe: rank for rank, pipe in enumerate(self._pipes)}
        while silent and time.monotonic() < until:
            for pipe in multiprocessing.connection.wait(list(silent), until - time.monotonic()):
                rank = silent.pop(pipe)
                with contextlib.suppress(EOFError, ConnectionResetError):
                    found[rank] = pipe.recv()
                if not found.get(rank, (False, "it has died"))[0]:
                    until = min(until, time.monotonic() + AFTER_A_FAILURE_S)
        if len(found) < self.size:
            self.close(force=True)
            self._start()
        return [found.get(k, (False, f"rank {k} hangs in {function.__name__} or has died")) for k in range(self.size)]

    def begin(self, function, *args):
        """Start `function(*args)` on every rank."""
        self._tasks += 1
        for pipe in self._pipes:
            pipe.send((function.__module__, function.__name__, args))

    def answer(self, rank, doing="it"):
        """(ok, result or error text) of one rank."""
        pipe = self._pipes[rank]
        assert pipe.poll(PATIENCE_S), f"rank {rank} did not answer within {PATIENCE_S} s: {doing} hangs"
        return pipe.recv()

    def strike(self, rank, fate):
        """Kill a rank, or stop it where it is."""
        os.kill(self._processes[rank].pid, {"killed": signal.SIGKILL, "stopped": signal.SIGSTOP}[fate])

    def run(self, function, *args):
        """Results of `function(*args)`, a list by rank; fails the test if any rank failed."""
        outcomes = self.outcomes(function, *args)
        assert all(ok for ok, _ in outcomes), "\n".join(str(r) for ok, r in outcomes if not ok)
        return [result for _, result in outcomes]

    def errors(self, function, *args):
        """First lines of the errors that `function(*args)` must raise on every rank."""
        outcomes = self.outcomes(function, *args)
        assert not any(ok for ok, _ in outcomes), outcomes
        return [text.splitlines()[0] for _, text in outcomes]

    def renew(self, after):
        """Take new processes if these have done more tasks: each leaves some threads of its groups behind."""
        if self._tasks > after:
            self.close()
            self._start()

    def close(self, force=False):
        """End all processes; with `force`, without asking them."""
        for process in self._processes if force else ():
            process.kill()
        for pipe in () if force else self._pipes:
            pipe.send(None)
        for process in self._processes:
            process.join(10)
            if process.is_alive():
                process.kill()
