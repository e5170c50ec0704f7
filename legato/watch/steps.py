"""Count the steps of a training script, and record some of them with torch's profiler."""

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
from legato.pytorch.device import is_capturing
from legato.pytorch.private.dynamo import not_compiled
from legato.pytorch.private.groups import default_store
from legato.pytorch.private.tensors import on_profilers
from legato.watch import WARM_UP, Settings
from legato.watch.delivery import Delivery, say

__all__ = ["MOST_RANKS", "Watch", "recording_ranks"]

#: In larger jobs, only about this number of ranks records: all ranks of evenly spaced hosts.
MOST_RANKS = 32
#: A recording is given up after these seconds, plus this multiple of the time that its steps should take.
_PATIENCE_S, _PATIENCE = 60.0, 10.0
#: When the script ends, it waits at most these seconds for the verdict.
_EXIT_S = 300.0
#: The number of steps before a recording whose durations are known.
_TIMED = 64


def recording_ranks(world: int, per_host: int) -> list[int]:
    """Return the ranks that record: all ranks, or in a large job the ranks of evenly spaced hosts."""
    if world <= MOST_RANKS:
        return list(range(world))
    hosts, chosen = -(-world // per_host), max(1, MOST_RANKS // per_host)
    firsts = {k * hosts // chosen for k in range(chosen)}
    return [rank for rank in range(world) if rank // per_host in firsts]


class Watch:
    """The watcher of the training in this process.

    The watcher counts the steps of the optimizer with the most parameters. A step that a `GradScaler` skips does not
    count, unless a fused optimizer skips it inside its kernel. Several backward passes that accumulate gradients are
    one step.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._sizes: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._chief: Callable[[], Any] = lambda: None
        self._steps, self._next = 0, settings.after
        self._moments: deque[float] = deque(maxlen=_TIMED)
        self._recording: _Recording | None = None
        self._delivery: Delivery | None = None
        self._here = self._others = False  # is this code, or is the script, using the profiler now?
        on_profilers(self._script_profiles, self._script_profiled)

    @not_compiled
    def stepped(self, optimizer: Any) -> None:
        """Handle a step of an optimizer. An error here prints one line and ends the watching, not the training."""
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
        """Return whether this optimizer has the most parameters.

        If an optimizer with more parameters steps, counting starts again.
        """
        if optimizer not in self._sizes:
            self._sizes[optimizer] = sum(p.numel() for group in optimizer.param_groups for p in group["params"])
        chief = self._chief()
        if chief is None or self._sizes[optimizer] > self._sizes[chief]:
            self._chief = weakref.ref(optimizer)
            if chief is not None and (self._next or self._recording is not None):
                if self._recording is not None:
                    self._give_up("an optimizer with more parameters stepped during the recording")
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
        """Start recording, if this rank should record and can."""
        rank, world = _place()
        ranks = recording_ranks(world, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
        if rank not in ranks:
            return
        store = default_store() if world > 1 else None
        delivery = Delivery(self._settings, rank, ranks, world, self._steps + WARM_UP, store, self._delivery)
        if self._delivery is not None and self._delivery.is_alive():
            delivery.drop()
            if rank == 0:
                say(f"step {self._steps}: not recorded, because the previous traces are still being judged")
            return
        self._delivery = delivery
        if self._others:
            self._give_up("the script profiles itself")
        elif threading.current_thread() is not threading.main_thread():
            self._give_up("the optimizer does not step in the main thread")
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
            f"{format_seconds(recording.step_s)} per step before, {format_seconds(statistics.median(meanwhile))} "
            f"during the recording, and {format_seconds(saved_s)} once to save the trace"
        )
        self._delivery.start()

    def _give_up(self, why: str) -> None:
        """End the recording without a trace, and tell rank 0 the reason."""
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
            self._give_up(f"the steps to record did not end within {format_seconds(limit_s)}")

    def _script_profiles(self) -> None:
        """End the recording when the script starts a profiler: only one can run, and the script's has precedence."""
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
        """Wait for the verdict at the end of the script, or say why there is none."""
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
                f"no verdict: the script ended after {count(self._steps, 'step')}, before steps {first} to {last} "
                "were recorded (see --after and --steps)"
            )


class _Recording:
    """A recording of some steps with the profiler. `saved_s` is the time that saving the trace took, or None."""

    def __init__(self, steps: int, trace: Path, step_s: float) -> None:
        wanted = profiler.schedule(wait=0, warmup=WARM_UP, active=steps, repeat=1)
        self._profiler = profiler.profile(schedule=wanted, record_shapes=True, on_trace_ready=self._save)
        self._trace, self._wanted = trace, True
        self.step_s, self.saved_s = step_s, None

    saved_s: float | None

    def start(self, limit_s: float, late: Callable[[_Recording, float], None]) -> None:
        """Start recording; if it lasts longer than `limit_s` seconds, the main thread calls `late(self, limit_s)`."""
        # Only the thread that started the profiler can stop it, and this call also reaches a main thread inside C code.
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
        """Stop the profiler. If not all steps were recorded, no trace is saved."""
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
    """Make Kineto print nothing, and detach it from a GPU after recording, because otherwise later steps are slower.

    Kineto reads these environment variables when it is first used and when it ends. Before CUDA 12.6, Kineto stays
    attached, because detaching it would make CUDA graphs crash.
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
    """Return the rank of this process and the number of ranks."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return int(os.environ.get("RANK", "0")), 1
