"""When a rank fails: who is missing, and where do the others stand?

[Note: asking around] A rank whose message fails knows only that it did. So each
rank has a thread that looks into the job's store once in a while. Whoever fails
writes that down there; every thread that is alive answers with what its rank is
doing, down to the line of the main thread. Who does not answer was killed, is
stopped, or is cut off. A rank that ends with an exception says so on its way
out, and a rank that waits sees it within a second or two instead of after the
process group's timeout. The store is asked by the thread alone: should it hang
too (rank 0 keeps it, unless torchrun does), the rank still ends in time.

The flight record: what one rank did last, kept in memory, written to a file when something fails.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import os
import re
import sys
import tempfile
import threading
import time
import traceback
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch.distributed.distributed_c10d import _get_default_store

from legato.core.errors import RankError

__all__ = ["FlightRecorder", "Watchdog"]

POLL_S = 0.5
#: So long a failing rank waits for the others' answers, once.
ANSWER_S = 4.0
_FAILED = "failed as well"
_MAIN = threading.main_thread()


class Watchdog:
    """One rank's part in finding out what went wrong; `standing()` says in words what the rank is doing."""

    def __init__(self, group: Any, flight_recorder: FlightRecorder, standing: Callable[[], str]) -> None:
        self.rank, self.size = group.rank(), group.size()
        self.flight_recorder = flight_recorder
        self._waits_can_be_cut = group.name() == "gloo"
        self._standing = standing
        store: Any = _get_default_store().clone()  # type: ignore[attr-defined]
        self._store = torch._C._distributed_c10d.PrefixStore(f"legato/watch/{group.group_name}", store)
        self._failure = ""  # what this rank has to report
        self._seen = ""  # what another one reported
        self._answers: dict[int, str] = {}
        self._store_lost = self._left = False
        self._wake, self._asked = threading.Event(), threading.Event()
        self._raised: RankError | None = None
        if self.size > 1:
            self._thread = threading.Thread(target=_look, args=(weakref.ref(self), self._wake), daemon=True)
            self._thread.start()
            leave = functools.partial(_leave, weakref.ref(self))
            atexit.register(leave)
            for over in (weakref.finalize(self, self._wake.set), weakref.finalize(self, atexit.unregister, leave)):
                over.atexit = False

    @property
    def failed(self) -> bool:
        """Whether a collective failed, here or on another rank."""
        return self._raised is not None or bool(self._seen)

    def wait(self, work: Any) -> None:
        """Wait for a collective; unlike `work.wait()`, Ctrl-C and another rank's failure end it.

        [Note: NCCL] Its `wait` only orders streams and does not block, and with a
        timeout it would; there is nothing to cut short.
        """
        if not self._waits_can_be_cut:
            work.wait()
            return
        try:
            while not self._done(work):
                if self._seen:
                    raise RuntimeError(self._seen)
        except KeyboardInterrupt as interrupt:
            path = self.flight_recorder.write("interrupted", {})
            interrupt.add_note(f"rank {self.rank} was waiting for the other ranks; the last messages are in {path}")
            raise

    def _done(self, work: Any) -> bool:
        try:
            work.wait(timedelta(seconds=1))
        except RuntimeError:
            if not work.is_completed():
                return False
            work.wait()  # raises what really happened
        return True

    def failure(self, what: str, error: BaseException) -> RankError:
        """The error to raise: what failed here, what the others are doing, where the record is. The first one stays."""
        if self._raised is None:
            said = f"rank {self.rank}: {what}: {_reason(error)}"
            self._failure = said
            self._wake.set()
            if self.size > 1 and not self._asked.wait(ANSWER_S + 1):
                self._store_lost = True
            path = self.flight_recorder.write(said, self._answers)
            self._raised = RankError(f"{said}; {self._verdict()}the last messages are in {path}")
        return self._raised

    def _verdict(self) -> str:
        """What is known of the others: the missing first, then those that stand elsewhere; at most eight."""
        if self._store_lost:
            return "nobody could be asked: the store is gone, and with it rank 0, unless torchrun keeps it; "
        silent = [r for r in range(self.size) if r != self.rank and r not in self._answers]
        words = [f"rank {r} does not answer (killed, stopped or cut off)" for r in silent]
        words += [f"rank {r} {a}" for r, a in sorted(self._answers.items()) if a != _FAILED and a not in self._failure]
        words = words[:8]
        if too := [r for r, a in sorted(self._answers.items()) if a == _FAILED]:
            words.append(f"rank {too[0]}" + f" and {len(too) - 1} more" * (len(too) > 1) + f" {_FAILED}")
        return "".join(f"{w}; " for w in words)

    # ---- on the thread ---------------------------------------------------------------

    def _look_once(self) -> bool:
        """Look into the store, answer or ask; False when there is no more to do."""
        if self._failure:
            self._report()
            return False
        if self._left or not self._store.check(["failed"]):
            return not self._left
        self._seen = self._store.get("failed").decode(errors="replace")
        self._store.set(f"answer/{self.rank}", self._standing() + _where())
        return True

    def _report(self) -> None:
        self._store.set(f"answer/{self.rank}", _FAILED)
        if not self._store.check(["failed"]):
            self._store.set("failed", self._failure)
        deadline = time.monotonic() + ANSWER_S
        missing = [r for r in range(self.size) if r != self.rank]
        while missing and time.monotonic() < deadline:
            for r in missing:
                if self._store.check([f"answer/{r}"]):
                    self._answers[r] = self._store.get(f"answer/{r}").decode(errors="replace")
            missing = [r for r in missing if r not in self._answers]
            time.sleep(0.05)
        self._asked.set()

    def leave(self) -> None:
        """The process ends: say how, for those who wait for this rank."""
        self._left = True
        error = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
        if self._raised is not None:
            return
        said = "ended, without an error"
        if error is not None:
            said = f"ended with {type(error).__name__}: {_reason(error)}{_raised_where(error)}"
        self._store.set(f"answer/{self.rank}", said)
        if error is not None and not self._store.check(["failed"]):
            self._store.set("failed", f"rank {self.rank} {said}")


def _look(of: weakref.ref[Watchdog], wake: threading.Event) -> None:
    """The thread: it ends with the watch, with the store, or when all is said."""
    while True:
        wake.wait(POLL_S)
        watchdog = of()
        try:
            if watchdog is None or not watchdog._look_once():
                return
        except RuntimeError:
            if watchdog is not None:
                watchdog._store_lost = True
                watchdog._asked.set()
            return
        del watchdog


def _leave(of: weakref.ref[Watchdog]) -> None:
    watchdog = of()
    if watchdog is not None:
        with contextlib.suppress(RuntimeError):  # the store is gone, and with it whoever could read this
            watchdog.leave()


def _reason(error: BaseException) -> str:
    """The first line of an error, without the source file and the advice that gloo puts around it."""
    line = (str(error).splitlines() or [""])[0] or type(error).__name__
    return re.sub(r"^\[[^]]*/gloo/[^]]*\] |\. This is typically caused by .*$", "", line)


def _where() -> str:
    """The line that the main thread is at, outside torch."""
    frame = sys._current_frames().get(_MAIN.ident or 0)
    lines = traceback.extract_stack(frame) if frame else []
    return _line(lines)


def _raised_where(error: BaseException) -> str:
    return _line(traceback.extract_tb(error.__traceback__))


def _line(frames: Any) -> str:
    own = f"{os.sep}site-packages{os.sep}", f"{os.sep}legato{os.sep}pytorch{os.sep}", f"{os.sep}lib{os.sep}python"
    for frame in reversed(list(frames)):
        if not any(part in frame.filename for part in own):
            return f" (at {os.path.basename(frame.filename)}:{frame.lineno} in {frame.name})"
    return ""


#: So many events are kept; noting one costs well under a microsecond.
EVENTS = 2000


class FlightRecorder:
    """The last events of one rank: passes that began and ended, messages that went out and came in.

    The file is JSON lines: the failure first, then one event a line, oldest
    first, `{"time", "event", "pass", "message", "label"}`; `time` is seconds
    since the epoch, `pass` counts backward passes that send, from 1. It lies in
    `directory`, or in `$LEGATO_FLIGHT_DIR`, or in the system's directory for
    temporary files.
    """

    def __init__(self, rank: int, directory: str | os.PathLike[str] | None = None) -> None:
        self.rank = rank
        self._directory = Path(directory or os.environ.get("LEGATO_FLIGHT_DIR") or tempfile.gettempdir())
        self._events: deque[tuple[float, str, int, int, str]] = deque(maxlen=EVENTS)

    def note(self, event: str, number: int = 0, message: int = -1, label: str = "") -> None:
        """Something happened now, in backward pass `number`."""
        self._events.append((time.time(), event, number, message, label))

    def write(self, reason: str, others: Mapping[int, str]) -> str:
        """Write the record; returns its path, or why there is none. Never raises: it runs where something failed."""
        path = self._directory / f"legato-flight-rank{self.rank}-{os.getpid()}.jsonl"
        lines = [{"time": time.time(), "rank": self.rank, "failure": reason, "others": dict(others)}]
        lines += [
            {"time": at, "event": event, "pass": number, "message": message, "label": label}
            for at, event, number, message, label in list(self._events)
        ]
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
        except OSError as error:
            return f"nowhere ({error})"
        return str(path)
