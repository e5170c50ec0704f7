"""The journal of a sweep: a file of finished cells from which an interrupted sweep continues.

The file has JSON lines, and the first line names the format. A line is appended for
each finished cell. Reading skips a line that an interruption left incomplete.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

import msgspec

from legato.core.errors import FileError
from legato.sweeps.cell import Outcome

__all__ = ["Journal", "journal_of"]


class _Line(msgspec.Struct, frozen=True):
    key: str
    outcome: Outcome


_HEADER = b'{"format":"legato.sweep/1"}\n'


def journal_of(output: Path) -> Path:
    """Return the path of the journal, which is next to the output file."""
    return output.with_name(output.name + ".cells.jsonl")


class Journal:
    """The finished cells by key, in a file that is open during one sweep at a time.

    Raises `FileError` if the file is not a journal, cannot be written, or is open
    in another sweep.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.done: dict[str, Outcome] = {}
        try:
            self._file = open(self.path, "ab+")  # noqa: SIM115
        except (OSError, ValueError) as error:
            raise self._error(error) from None
        try:
            self._open()
        except BaseException:
            self._file.close()
            raise

    def _open(self) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._file.seek(0)
            lines = self._file.read().splitlines(keepends=True)
            if not lines:
                self._file.write(_HEADER)
            elif len(lines) == 1 and _HEADER.startswith(lines[0]):  # an interruption left the header incomplete
                self._file.truncate(0)
                self._file.write(_HEADER)
            elif lines[0] != _HEADER:
                raise FileError(
                    f"{self.path}: not the journal of a sweep (expected {_HEADER.decode().strip()} in the first line)"
                )
            elif not lines[-1].endswith(b"\n"):
                self._file.write(b"\n")  # ends the incomplete line
            self._file.flush()
        except BlockingIOError:
            raise FileError(f"{self.path}: another sweep is writing to it") from None
        except OSError as error:
            raise self._error(error) from None
        self.done.update(_read(lines))

    def _error(self, error: Exception) -> FileError:
        return FileError(f"{self.path}: cannot store finished cells: {getattr(error, 'strerror', None) or error}")

    def add(self, key: str, outcome: Outcome) -> None:
        """Add the outcome of a cell. If no other attempt could change it (`final`), it is also written to the file."""
        self.done[key] = outcome
        if outcome.final:
            try:
                self._file.write(msgspec.json.encode(_Line(key, outcome)) + b"\n")
                self._file.flush()
            except OSError as error:
                raise self._error(error) from None

    def forget(self) -> None:
        """Remove all cells, also from the file."""
        self.done.clear()
        self._file.truncate(0)
        self._file.write(_HEADER)
        self._file.flush()

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()


def _read(lines: list[bytes]) -> Iterator[tuple[str, Outcome]]:
    decoder = msgspec.json.Decoder(_Line)
    for line in lines[1:]:
        with contextlib.suppress(msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            found = decoder.decode(line)
            yield found.key, found.outcome
