"""Counts the steps of a training, and records some of them with torch's profiler."""

from __future__ import annotations

import ctypes
import os
import statistics
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import profiler
from torch.torch_version import TorchVersion

from legato.core.text import count
from legato.core.units import format_seconds
from legato.pytorch._private import default_store, not_compiled, on_profilers
from legato.pytorch.device import is_capturing
from legato.watch import WARM_UP, Settings
from legato.watch.delivery import Delivery, say

__all__ = ["MOST_RANKS", "Watch", "recording_ranks"]

#: Larger jobs record on whole hosts, evenly spaced, of this many ranks in all.
MOST_RANKS = 32
#: A recording ends without a verdict after these seconds, and this many times what its steps should take.
_PATIENCE_S, _PATIENCE = 60.0, 10.0
#: When the script ends, it waits so long for the verdict.
_EXIT_S = 300.0
#: The last steps before a recording, which tell how long a step takes.
_TIMED = 64


def recording_ranks(world: int, per_host: int) -> list[int]:
    """Return the ranks that record: all, or all ranks of evenly spaced hosts, the first host among them."""
    if world <= MOST_RANKS:
        return list(range(world))
    hosts, chosen = -(-world // per_host), max(1, MOST_RANKS // per_host)
    firsts = {k * hosts // chosen for k in range(chosen)}
    return [rank for rank in range(world) if rank // per_host in firsts]


class Watch:
    """Watches the training of this process.

    A step is a step of the optimizer that has most parameters. A step that a `GradScaler` skips does not count, and
    several backward passes that accumulate gradients make one step. (A fused optimizer that skips inside its kernel has
    stepped.)
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._sizes: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._chief: Callable[[], Any] = lambda: None
        self._steps, self._next = 0, settings.after
        self._moments: deque[float] = deque(maxlen=_TIMED)
        self._recording: _Recording | None = None
        self._delivery: Delivery | None = None
        self._here = self._others = False  # whether this, and whether the script uses the profiler now
        on_profilers(self._script_profiles, self._script_profiled)

    @not_compiled
    def stepped(self, optimizer: Any) -> None:
        """An optimizer has stepped. Whatever goes wrong here is one line, and ends what is watched."""
        try:
            with self._inside():
                if not is_capturing() and self._counts(optimizer):
                    self._step()
        except Exception as error:
            self._next = 0
            self._give_up(f"{type(error).__name__}: {error}")
        if self._settings.stop and self._steps == self._settings.last and self._chief() is optimizer:
            self._wait(_EXIT_S)
            raise SystemExit(int(self._delivery is not None and bool(self._delivery.lacking)))

    @contextmanager
    def _inside(self) -> Iterator[None]:
        before, self._here = self._here, True
        try:
            yield
        finally:
            self._here = before

    def _counts(self, optimizer: Any) -> bool:
        """Return whether this optimizer has the most parameters. The steps of a larger one count from its first."""
        if optimizer not in self._sizes:
            self._sizes[optimizer] = sum(p.numel() for group in optimizer.param_groups for p in group["params"])
        chief = self._chief()
        if chief is None or self._sizes[optimizer] > self._sizes[chief]:
            self._chief = weakref.ref(optimizer)
            if chief is not None and (self._next or self._recording is not None):
                if self._recording is not None:
                    self._give_up("a larger optimizer has stepped meanwhile")
                self._steps, self._next = 0, self._settings.after
        return self._chief() is optimizer

    def _step(self) -> None:
        self._steps += 1
        self._moments.append(time.perf_counter())
        if self._recording is not None:
            self._recording.step()
            if self._recording.saved_s is not None:
                self._deliver(self._recording, self._recording.saved_s)
        elif self._steps == self._next:
            self._next = self._next + self._settings.every if self._settings.every else 0
            self._begin()

    def _begin(self) -> None:
        """Record from here on, if this rank should and can."""
        rank, world = _place()
        ranks = recording_ranks(world, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
        if rank not in ranks:
            return
        store = default_store() if world > 1 else None
        delivery = Delivery(self._settings, rank, ranks, world, self._steps + WARM_UP, store, self._delivery)
        if self._delivery is not None and self._delivery.is_alive():
            delivery.drop()
            if rank == 0:
                say(f"step {self._steps}: nothing is recorded, because the traces before are still judged")
            return
        self._delivery = delivery
        if self._others:
            self._give_up("the script profiles itself")
        elif threading.current_thread() is not threading.main_thread():
            self._give_up("steps are not taken by the main thread")
        else:
            durations = [b - a for a, b in pairwise(self._moments)]
            step_s = statistics.median(durations) if durations else 0.0
            limit_s = _PATIENCE_S + _PATIENCE * step_s * (WARM_UP + self._settings.steps)
            self._recording = _Recording(self._settings.steps, self._delivery.trace, step_s)
            self._recording.start(limit_s, self._out_of_time)

    def _deliver(self, recording: _Recording, saved_s: float) -> None:
        self._recording = None
        recording.end()
        meanwhile = [b - a for a, b in pairwise(self._moments)][-self._settings.steps :]
        assert self._delivery is not None
        self._delivery.cost = (
            f"{format_seconds(recording.step_s)} a step before, {format_seconds(statistics.median(meanwhile))} "
            f"meanwhile, and {format_seconds(saved_s)} once to save the trace"
        )
        self._delivery.start()

    def _give_up(self, why: str) -> None:
        """End a recording without a trace, and tell rank 0 why."""
        recording, self._recording = self._recording, None
        try:
            if recording is not None:
                with self._inside():
                    recording.end()
        except Exception as error:
            why = f"{why} ({type(error).__name__}: {error})"
        if self._delivery is not None and self._delivery.ident is None:  # not started
            self._delivery.problem = why
            self._delivery.start()
        else:
            say(f"no verdict: {why}")

    def _out_of_time(self, recording: _Recording, limit_s: float) -> None:
        if self._recording is recording and not self._here:
            self._give_up(f"no steps came while they were recorded, for {format_seconds(limit_s)}")

    def _script_profiles(self) -> None:
        """Make way for a profiler that the script starts: only one can run, and the script's comes first."""
        if not self._here:
            self._others = True
            if self._recording is not None:
                self._give_up("the script profiles itself")

    def _script_profiled(self) -> None:
        self._others = self._others and self._here

    def _wait(self, seconds: float) -> None:
        """Wait until the traces have been delivered, and on rank 0 for the verdict."""
        if self._delivery is not None and self._delivery.ident is not None:
            self._delivery.join(seconds)
            self._delivery.cancelled.set()
            self._delivery.join()

    def ended(self) -> None:
        """The script has ended: wait for the verdict, or say why there is none."""
        recording, self._recording = self._recording, None
        try:
            if recording is not None and self._delivery is not None:
                with self._inside():
                    recording.end()
                self._delivery.drop()
            self._wait(0.0 if hasattr(sys, "last_type") else _EXIT_S)  # after an error, do not wait
        except KeyboardInterrupt:
            return
        document = b"" if self._delivery is None else self._delivery.document
        if self._settings.json and document:
            sys.stdout.flush()
            sys.stdout.buffer.write(document)
            sys.stdout.flush()
        if (recording is not None or self._delivery is None) and not document and os.environ.get("RANK", "0") == "0":
            first, last = self._settings.last - self._settings.steps + 1, self._settings.last
            say(
                f"no verdict: the script ended after {count(self._steps, 'step')}, and steps {first} to {last} "
                "were to be recorded (--after and --steps)"
            )


class _Recording:
    """Some steps under the profiler; once their trace is saved, `saved_s` is how long that took."""

    def __init__(self, steps: int, trace: Path, step_s: float) -> None:
        wanted = profiler.schedule(wait=0, warmup=WARM_UP, active=steps, repeat=1)
        self._profiler = profiler.profile(schedule=wanted, record_shapes=True, on_trace_ready=self._save)
        self._trace, self._wanted = trace, True
        self.step_s, self.saved_s = step_s, None

    saved_s: float | None

    def start(self, limit_s: float, late: Callable[[_Recording, float], None]) -> None:
        """Begin; `late(self, limit_s)` is called in the main thread if the last step has not come then."""
        # A thread that is not the profiler's cannot stop it, and a main thread in C cannot be asked otherwise.
        self._late = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)(lambda _: late(self, limit_s) or 0)
        self._timer = threading.Timer(limit_s, lambda: ctypes.pythonapi.Py_AddPendingCall(self._late, None))
        self._timer.daemon = True
        self._timer.start()
        with _set_for_kineto():
            self._profiler.start()

    def step(self) -> None:
        begin_s = time.perf_counter()
        with _set_for_kineto():
            self._profiler.step()
        if not self._wanted:
            self.saved_s = time.perf_counter() - begin_s

    def end(self) -> None:
        """Stop the profiler; without all steps, nothing is saved."""
        self._wanted = False
        self._timer.cancel()
        with _set_for_kineto():
            self._profiler.stop()

    def _save(self, recorded: Any) -> None:
        if self._wanted:
            self._wanted = False
            recorded.export_chrome_trace(str(self._trace))


@contextmanager
def _set_for_kineto() -> Iterator[None]:
    """Make Kineto print nothing, and leave a GPU when it has recorded, for else all later steps are slower.

    It reads these settings, of the environment, when it is first used and when it ends. Before CUDA 12.6, CUDA graphs
    crash once it has left.
    """
    wanted = {"KINETO_LOG_LEVEL": "99"}
    if torch.version.cuda is not None and TorchVersion(torch.version.cuda) >= "12.6":
        wanted["TEARDOWN_CUPTI"] = "1"
    added = {name: value for name, value in wanted.items() if name not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)


def _place() -> tuple[int, int]:
    """The rank of this process, and how many there are."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return int(os.environ.get("RANK", "0")), 1
