"""Send the traces of a recording to rank 0, which runs a process that judges them.

[Note: costs] A low-priority process compresses a trace. The trace then passes through the job's store in pieces of 1
MiB. At most about 32 ranks record, and each of these ranks has at most one piece in the store, so the store holds at
most about 32 MiB. All waiting is done on the connection of a clone of the store, so the training's own connection never
waits. The process that judges the traces also has low priority, and ends when its parent ends. Every wait has a time
limit.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from legato.core.errors import LegatoError
from legato.core.text import count, one_line
from legato.core.units import format_bytes
from legato.pytorch.private.groups import PrefixStore
from legato.watch import ROOT, Settings

__all__ = ["Delivery", "say"]

_PIECE_BYTES = 2**20
#: The largest size of a rank's compressed trace.
_MOST_BYTES = 256 * 2**20
#: Seconds that rank 0 waits for each piece of a trace, and seconds for a rank's turn and for the verdict.
_TRACE_S, _TURN_S = 120.0, 600.0
#: The key that rank 0 sets when it accepts no more traces.
_OVER = "over"
_JUDGE = "from legato.cli.watch import judge; judge()"


def say(text: str) -> None:
    """Print lines to the original standard error, even if the script has redirected its own."""
    with suppress(OSError, ValueError, AttributeError):  # closed, full, or none
        sys.__stderr__.write(f"legato: watch: {text}\n")  # type: ignore[union-attr]
        sys.__stderr__.flush()  # type: ignore[union-attr]


class Delivery(threading.Thread):
    """A thread that sends the trace of one rank to rank 0; on rank 0, it collects all traces and prints the verdict.

    `trace` is the file in which the rank saves its trace, and `problem` says why it has none. `document` is the last
    verdict as JSON.
    """

    def __init__(
        self,
        settings: Settings,
        rank: int,
        ranks: Sequence[int],
        world: int,
        before: int,
        store: Any,
        last: Delivery | None,
    ) -> None:
        super().__init__(name="legato watch", daemon=True)
        self._settings, self._rank, self._ranks, self._world = settings, rank, ranks, world
        self._first, self._last = before + 1, before + settings.steps
        self._server = store  # kept alive, because this process may host the store
        self._store: Any = None if store is None else PrefixStore(f"legato/watch/steps/{before}", store.clone())
        self.folder = Path(tempfile.mkdtemp(prefix="legato-watch-"))
        self.trace = self.folder / "trace.json"
        self.problem = self.cost = self.lacking = ""
        self.document = b"" if last is None else last.document
        self.cancelled = threading.Event()

    def run(self) -> None:
        """Send or collect the traces, and print one line if that fails."""
        try:
            self._collect() if self._rank == 0 else self._send()
        except Exception as error:
            self.lacking = one_line(
                f"{error}" if isinstance(error, LegatoError) else f"{type(error).__name__}: {error}"
            )
            if self._rank == 0 or not self.cancelled.is_set():
                say(f"no verdict: {f'rank {self._rank}: ' if self._rank else ''}{self.lacking}")
        finally:
            self.drop()

    def drop(self) -> None:
        """Delete this rank's files; rank 0 also tells the other ranks not to wait."""
        shutil.rmtree(self.folder, ignore_errors=True)
        with suppress(Exception):  # the store may have ended
            if self._rank == 0 and self._store is not None:
                self._store.set(_OVER, b"")

    # ---- another rank -------------------------------------------------------------------

    def _send(self) -> None:
        key = str(self._rank)

        def taken() -> bool:
            return over() or not self._store.check([key])

        def over() -> bool:
            return bool(self._store.check([_OVER]))

        for piece in self._pieces():
            self._until(taken, _TURN_S, "was taken")
            if over():
                return
            self._store.set(key, piece)

    def _pieces(self) -> Iterator[bytes]:
        """Yield an empty piece, the pieces of the trace, and an empty piece; without a trace, yield only the reason."""
        try:
            packed = self._packed()
        except Exception as error:
            yield str(error).encode()[:_PIECE_BYTES] or b"?"
            return
        yield b""
        with packed.open("rb") as file:
            while piece := file.read(_PIECE_BYTES):
                yield piece
        yield b""

    def _packed(self) -> Path:
        """Compress the trace of this rank, and return its file."""
        if self.problem:
            raise LegatoError(self.problem)
        self._process(["-m", "gzip", "--fast", str(self.trace)], _TRACE_S)
        self.trace.unlink()
        packed = self.trace.with_suffix(".json.gz")
        if packed.stat().st_size > _MOST_BYTES:
            most = format_bytes(_MOST_BYTES)
            raise LegatoError(f"a trace of {format_bytes(packed.stat().st_size)} (expected {most}: fewer --steps)")
        return packed

    # ---- rank 0 -------------------------------------------------------------------------

    def _collect(self) -> None:
        traces = Path(self._settings.output or self.folder) / f"step-{self._last}"
        traces.mkdir(parents=True, exist_ok=True)
        problems: dict[str, list[int]] = {}
        for rank in self._ranks:
            path = traces / f"rank{rank}.json.gz"
            try:
                shutil.move(self._packed(), path) if rank == 0 else self._receive(str(rank), path)
            except Exception as error:
                path.unlink(missing_ok=True)  # of this recording or of an earlier run
                problems.setdefault(one_line(str(error)), []).append(rank)
        arrived = len(self._ranks) - sum(map(len, problems.values()))
        if not arrived:
            raise LegatoError("; ".join(problems))
        for why, ranks in problems.items():
            say(f"no trace of rank {', '.join(map(str, ranks))}: {why}")
        verdict = self._judged(traces)
        where = f"steps {self._first} to {self._last}, recorded on {arrived} of {count(self._world, 'rank')}"
        where += ", which communicates with no other" if self._world == 1 else ""
        say(f"{where}{f' ({self.cost})' if self.cost else ''}\n{verdict}")

    def _receive(self, key: str, path: Path) -> None:
        if problem := self._take(key):
            raise LegatoError(problem.decode(errors="replace"))
        with path.open("wb") as file:
            while piece := self._take(key):
                if file.write(piece) and file.tell() > _MOST_BYTES:
                    raise LegatoError(f"more than {format_bytes(_MOST_BYTES)}")

    def _take(self, key: str) -> bytes:
        self._until(lambda: self._store.check([key]), _TRACE_S, "arrived")
        piece: bytes = self._store.get(key)
        self._store.delete_key(key)
        return piece

    def _judged(self, traces: Path) -> str:
        """Return what `legato advise` prints about the traces; its page and JSON go next to the folder of traces."""
        document, before = traces.with_suffix(".json"), self.folder / "before.json"
        before.write_bytes(self.document)
        page = str(traces.with_suffix(".html")) if self._settings.output else ""
        said = self._process(["-c", _JUDGE, str(traces), str(before), str(document), page], _TURN_S)
        self.document = document.read_bytes()
        return said.rstrip()

    def _process(self, arguments: list[str], seconds: float) -> str:
        """Run Python at low priority, and return what it prints.

        Raises `LegatoError` if the process fails, or does not end within `seconds`.
        """
        printed = self.folder / "printed"
        path = os.pathsep.join(filter(None, [ROOT, os.environ.get("PYTHONPATH")]))
        with printed.open("wb") as file:
            process = subprocess.Popen(
                [sys.executable, "-u", "-P", *arguments],
                stdin=subprocess.PIPE,
                stdout=file,
                stderr=subprocess.STDOUT,
                env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
            )
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, process.pid, 19)
        try:
            self._until(lambda: process.poll() is not None, seconds, "was judged")
        finally:
            process.kill()
            process.communicate()
        said = printed.read_text(errors="replace")
        if process.returncode:
            raise LegatoError(said.strip().rpartition("\n")[2].removeprefix("legato: ") or f"exit {process.returncode}")
        return said

    def _until(self, ready: Callable[[], bool], seconds: float, what: str) -> None:
        """Wait until `ready()`. Raises `LegatoError` after `seconds`, or when the script has ended."""
        pause_s, end_s = 1e-3, time.monotonic() + seconds
        while not ready():
            if self.cancelled.wait(pause_s):
                raise LegatoError("the script ended before the verdict")
            if time.monotonic() > end_s:
                raise LegatoError(f"nothing {what} within {seconds:.0f} s")
            pause_s = min(2 * pause_s, 0.25)
