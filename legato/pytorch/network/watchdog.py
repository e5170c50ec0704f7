"""The watchdog: when a message fails, it finds out which ranks are missing and what the other ranks are doing.

docs/runtime.md ("When something fails") says what a user sees. Each rank has a thread that polls the process group's
store, and writes reports and answers to it. Only this thread accesses the store. Rank 0 hosts the store, unless
torchrun does. If rank 0 and the store hang, the other ranks still end in time.
"""

from __future__ import annotations

import atexit
import contextlib
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
from typing import Any, NoReturn

from legato.core.errors import LegatoError, RankError
from legato.pytorch.logger import logger
from legato.pytorch.private.groups import PrefixStore, default_store

__all__ = ["ANSWER_S", "FlightRecorder", "Watchdog", "reason"]

POLL_S = 0.5
#: The number of seconds that a failing rank waits, once, for the answers of the other ranks.
ANSWER_S = 4.0
_FAILED = "failed as well"
_MAIN = threading.main_thread()


class Watchdog:
    """Waits for collectives on behalf of one rank, and explains their failures.

    `status()` describes what the rank is doing; the watchdog's thread calls it. `name` must be the same on all ranks,
    and different from every other watchdog's.
    """

    def __init__(self, group: Any, flight_recorder: FlightRecorder, status: Callable[[], str], name: str) -> None:
        self.rank, self.size = group.rank(), group.size()
        self.flight_recorder = flight_recorder
        self._waits_can_be_cut = group.name() == "gloo"
        self._status = status
        self._store: Any = PrefixStore(f"legato/watch/{name}", default_store().clone())
        self._failure = ""  # what this rank reports
        self._seen = ""  # what another rank reported
        self.passes = 0  # the number of backward passes that have begun on this rank
        self._meetings, self._meeting = 0, ""  # the number of calls of `meet`, and the report of the last one
        self._answers: dict[int, str] = {}
        self._missing: list[int] = []  # the ranks that did not answer another rank
        self._store_lost = self._left = False
        self._wake, self._asked = threading.Event(), threading.Event()
        self._raised: RankError | None = None
        if self.size > 1:
            _note_exits()
            _Watch(self, self._wake).start()
            weakref.finalize(self, self._wake.set).atexit = False  # pyrefly: ignore[missing-attribute]

    @property
    def failed(self) -> bool:
        """Return whether this rank has failed, or has seen the report of a rank that has."""
        return self._raised is not None or bool(self._seen)

    def wait(self, work: Any) -> None:
        """Wait for a collective. Unlike `work.wait()`, the wait ends at Ctrl-C and when another rank fails.

        Raises `RuntimeError` if the collective failed, or another rank reported a failure.

        [Note: NCCL] Without a timeout, NCCL's `wait` only orders streams and does not block, so it is called directly.
        """
        if not self._waits_can_be_cut or work.is_completed():
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
            work.wait()  # this raises the real error
        return True

    def meet(self, what: str) -> None:
        """Record that this rank begins `what`, in which it waits for all ranks; all ranks must make this call.

        [Note: meetings] The watchdog's thread publishes how many such calls and how many backward passes this rank has
        made. Another rank that has made fewer calls but more passes has skipped the call.
        """
        self._meetings += 1
        if self.size > 1:
            self._meeting = json.dumps([self.rank, self._meetings, self.passes, what])
            self._wake.set()

    def failure(self, what: str, error: BaseException) -> RankError:
        """Return the error to raise: what failed here, what the other ranks do, and the path of the flight record.

        After the first failure, all calls return the same error.
        """
        if self._raised is None:
            said = f"rank {self.rank}: {what}: {reason(error)}"
            self._failure = said
            self._wake.set()
            if self.size > 1 and not self._asked.wait(ANSWER_S + 1):
                self._store_lost = True
            path = self.flight_recorder.write(said, self._answers)
            self._raised = RankError(f"{said}; {self._verdict()}the last messages are in {path}")
        return self._raised

    def _verdict(self) -> str:
        """Describe up to eight other ranks: first the ranks that do not answer, then those that do something else."""
        if self._store_lost and not self._missing:
            return "no rank could be asked: the store is gone, and with it rank 0, unless torchrun hosts it; "
        silent = self._missing or [r for r in range(self.size) if r != self.rank and r not in self._answers]
        words = [f"rank {r} does not answer (killed, stopped or cut off)" for r in silent]
        words += [f"rank {r} {a}" for r, a in sorted(self._answers.items()) if a != _FAILED and a not in self._failure]
        words = words[:8]
        if too := [r for r, a in sorted(self._answers.items()) if a == _FAILED]:
            words.append(f"rank {too[0]}" + f" and {len(too) - 1} more" * (len(too) > 1) + f" {_FAILED}")
        return "".join(f"{w}; " for w in words)

    # ---- on the thread ---------------------------------------------------------------

    def _look_once(self) -> bool:
        """Poll the store; answer another rank, or report a failure. Return False when nothing is left to do."""
        if self._failure:
            self._report()
            return False
        self._look_for_meetings()
        if self._left or not self._store.check(["failed"]):
            return not self._left
        self._seen = self._store.get("failed").decode(errors="replace")
        self._store.set(f"answer/{self.rank}", self._status() + _current_line())
        if self._store.check(["missing"]):
            self._missing = json.loads(self._store.get("missing"))
            self._store.set(f"heard/{self.rank}", "")
        return True

    def _look_for_meetings(self) -> None:
        told, self._meeting = self._meeting, ""
        if told:
            self._store.set("meeting", told)
            self._wake.clear()
        elif self._store.check(["meeting"]):
            rank, number, passes, what = json.loads(self._store.get("meeting"))
            if self._meetings < number and self.passes > passes:
                self._seen = f"rank {rank} waits in {what}, which all ranks have to call"

    def _report(self) -> None:
        self._store.set(f"answer/{self.rank}", _FAILED)
        if not self._store.check(["failed"]):
            self._store.set("failed", self._failure)
        deadline = time.monotonic() + ANSWER_S
        missing = sorted({*range(self.size)} - {self.rank})
        while missing and time.monotonic() < deadline:
            for r in missing:
                if self._store.check([f"answer/{r}"]):
                    self._answers[r] = self._store.get(f"answer/{r}").decode(errors="replace")
            missing = [r for r in missing if r not in self._answers]
            time.sleep(0.05)
        self._asked.set()
        if missing:  # the store may end with this rank, so tell the surviving ranks now
            self._store.set("missing", json.dumps(missing))
            heard = [f"heard/{r}" for r, answer in self._answers.items() if answer != _FAILED]
            while heard and not self._store.check(heard) and time.monotonic() < deadline + ANSWER_S:
                time.sleep(0.05)

    def explain(self) -> str:
        """Return an explanation if the process ends with a network error of DDP or the program; else an empty one."""
        error = _last_error()
        if self._raised is not None or isinstance(error, LegatoError) or not isinstance(error, RuntimeError):
            return ""
        if not _NETWORK.search(str(error)):
            return ""
        return str(self.failure(f"ended with {type(error).__name__}", error))

    def leave(self) -> None:
        """Report how this process ends, for the ranks that wait for it."""
        error = _last_error()
        if self._raised is not None:
            return
        status = _last_status
        failed = error is not None or status not in (None, 0)
        said = f"ended with exit status {status}" if failed else "ended, without an error"
        if error is not None:
            said = f"ended with {type(error).__name__}: {reason(error)}{_raised_where(error)}"
        self._store.set(f"answer/{self.rank}", said)
        if failed and not self._store.check(["failed"]):
            self._store.set("failed", f"rank {self.rank} {said}")


_last_status: Any = None
#: Words in the communication errors of all backends and stores.
_NETWORK = re.compile(r"gloo|nccl|store|connection|socket|timed? ?out|broken pipe", re.IGNORECASE)


def _last_error() -> BaseException | None:
    """Return the error with which the process ends, or None."""
    return getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)


def _note_exits() -> None:
    """Note the status of `sys.exit()` from now on, because the status is no longer known when the interpreter ends."""
    plain: Any = sys.exit
    if getattr(plain, "_legato_notes", False):
        return

    def exit(status: Any = None, /) -> NoReturn:
        global _last_status
        _last_status = status
        raise SystemExit(status)

    vars(exit)["_legato_notes"] = True
    sys.exit = exit
    atexit.register(_leave)


_watches: set[_Watch] = set()


class _Watch(threading.Thread):
    """The thread that polls the store until the watchdog or the store is gone, or a failure was reported.

    [Note: exits] If a watchdog's thread is using the store when the interpreter ends, the process aborts. So the
    process waits for these threads before it ends, for at most `ANSWER_S` seconds each. The threads are daemons
    nevertheless, so that a store that hangs does not keep the process from ending.
    """

    def __init__(self, watchdog: Watchdog, wake: threading.Event) -> None:
        super().__init__(name="legato-watchdog", daemon=True)
        self.of, self.wake = weakref.ref(watchdog), wake
        _watches.add(self)

    def run(self) -> None:
        goes_on = True
        while goes_on:
            self.wake.wait(POLL_S)
            goes_on = self._look()
        if self.of() is None:  # otherwise, the watchdog may still explain how the process ends
            _watches.discard(self)

    def _look(self) -> bool:
        watchdog = self.of()
        try:
            return watchdog is not None and watchdog._look_once()
        except RuntimeError:
            if watchdog is not None:
                watchdog._store_lost = True
                watchdog._asked.set()
            return False

    def leave(self) -> None:
        """End the thread, and report how the process ends."""
        watchdog = self.of()
        if watchdog is not None:
            watchdog._left = True
        self.wake.set()
        self.join(ANSWER_S)
        if watchdog is not None:
            with contextlib.suppress(RuntimeError):  # the store is gone
                watchdog.leave()


def _leave() -> None:
    dogs = [watch.of() for watch in list(_watches)]
    if said := next((said for dog in dogs if dog is not None and (said := dog.explain())), ""):
        logger.error("%s", said)
    for watch in list(_watches):
        watch.leave()


def reason(error: BaseException) -> str:
    """Return the first line of an error, without the source file and the advice that gloo adds."""
    line = (str(error).splitlines() or [""])[0] or type(error).__name__
    return re.sub(r"^\[[^]]*/gloo/[^]]*\] |\. This is typically caused by .*$", "", line)


def _current_line() -> str:
    """Return the line of the script at which the main thread is."""
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


#: The number of events that are kept. Recording an event takes well under a microsecond.
EVENTS = 2000


class FlightRecorder:
    """Keeps the last events of one rank: beginnings and ends of backward passes, launches and arrivals of messages.

    The file consists of JSON lines: first the failure, then one event per line, oldest first, `{"time", "event",
    "pass", "message", "label"}`. `time` is in seconds since the epoch; `pass` counts the backward passes that send
    messages, from 1. The file is written to `directory`, or to `$LEGATO_FLIGHT_DIR`, or else to the system's directory
    for temporary files.
    """

    def __init__(self, rank: int, directory: str | os.PathLike[str] | None = None) -> None:
        self.rank = rank
        self._directory = Path(directory or os.environ.get("LEGATO_FLIGHT_DIR") or tempfile.gettempdir())
        self._events: deque[tuple[float, str, int, int, str]] = deque(maxlen=EVENTS)

    def note(self, event: str, number: int = 0, message: int = -1, label: str = "") -> None:
        """Record an event that happens now, in backward pass `number`."""
        self._events.append((time.time(), event, number, message, label))

    def write(self, reason: str, others: Mapping[int, str]) -> str:
        """Write the record; return its path, or why it could not be written.

        Never raises an error, so that no failure is hidden.
        """
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
