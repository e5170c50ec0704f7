"""The flight record: what one rank did last, kept in memory, written to a file when something fails."""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections import deque
from collections.abc import Mapping
from pathlib import Path

__all__ = ["Flight"]

#: So many events are kept; noting one costs well under a microsecond.
EVENTS = 2000


class Flight:
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
