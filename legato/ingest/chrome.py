"""Read Chrome trace JSON event by event, so that a file of a gigabyte needs only the memory of a few blocks.

[Note: splitting JSON at guessed places] The array of events is split into runs of a few MiB, and a strict decoder
decodes each run as a whole. The place of a split is guessed: a `}`, a comma and a `{`. If the guess is inside a string
or inside an event, quotes or brackets are still open there. The run before a wrong guess, put in brackets, is not valid
JSON, so the next guess is tried. A run that decodes therefore ends between two events, and every accepted file would
also pass a decoder of the whole file.

[Note: values that are not JSON] Profilers write some values without escapes: infinities, and names with quotes,
backslashes or control characters (a Windows path, a dictionary, `<module>` of a notebook). If no guess makes a run
valid, these values are repaired and counted: a number that is not valid becomes `null`, and an invalid string is read
character by character. A string ends at a quote before a closing bracket, or before a comma and a key. A name may
itself contain a quote before a bracket or a key. So a name ends only at a quote before the end of the event, or before
a key that events have.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Generic, TypeVar

import msgspec

from legato.core.errors import FileError
from legato.core.text import count
from legato.ingest.source import BLOCK_BYTES, Progress, one_line, read_blocks

__all__ = ["Header", "events"]

Event = TypeVar("Event", bound=msgspec.Struct)

_SPLIT = re.compile(rb"\}\s*,\s*\{")
_OPEN = re.compile(rb'"traceEvents"\s*:\s*\[')
_NO_NUMBER = re.compile(rb"([:,\[]\s*)[-+]?(?:inf(?:inity)?|nan(?:\(\w*\))?)(?=\s*[,}\]])", re.IGNORECASE)
#: Patterns for the beginning of a name, for the beginning of another string of an event, and for the end of each.
_NAME = (
    re.compile(rb'"name"\s*:\s*"'),
    re.compile(rb'(?<!\\)"(?=\s*(?:\}\s*[,\]]|,\s*"(?:ph|cat|pid|tid|ts|dur|args|id|bp|s)"\s*:))'),
)
_STRING = re.compile(rb':\s*"'), re.compile(rb'(?<!\\)"(?=\s*(?:[}\]]|,\s*"[^"]{0,200}"\s*:))')
_ESCAPED = {ord('"'): b'\\"', ord("\\"): b"\\\\", **{c: b"\\u%04x" % c for c in range(32)}}
_PLACE = re.compile(r"[$]\[(\d+)\]")
#: An event or header of more bytes is an error.
_LONGEST_BYTES = 64 * 2**20
_TRIES = 64


class Header(msgspec.Struct):
    """The fields next to the array of events, and the number of values in the array that were not JSON."""

    distributed: dict[str, Any] = msgspec.field(default_factory=dict, name="distributedInfo")
    repaired: int = 0


def events(path: Path, kind: type[Event], header: Header, progress: Progress | None = None) -> Iterator[Event]:
    """Yield the events of a trace file in file order, and fill in `header`.

    The file must contain an object with `traceEvents`, or a bare array. Any other content raises `FileError`, with a
    message of one line.
    """
    reader = _Reader(path, kind, header)
    for block in read_blocks(path, progress):
        yield from reader.feed(block)
    yield from reader.finish()


def _repaired(data: bytes) -> tuple[bytes, int]:
    """Return the repaired bytes (see the note above), and the number of changed values."""
    changed = 0
    for begins, ends in (_NAME, _STRING):
        parts, at = [], 0
        for end in ends.finditer(data):
            opening = begins.search(data, at, end.start())
            if opening is not None:
                text = data[opening.end() : end.start()]
                try:
                    msgspec.json.decode(b'"' + text + b'"')
                except (msgspec.DecodeError, UnicodeDecodeError):
                    changed += 1
                    escaped = b"".join(_ESCAPED.get(byte, bytes((byte,))) for byte in text)
                    parts += [data[at : opening.end()], escaped.decode(errors="replace").encode()]
                    at = end.start()
            parts.append(data[at : end.end()])
            at = end.end()
        data = b"".join([*parts, data[at:]])
    data, numbers = _NO_NUMBER.subn(rb"\1null", data)
    return data, changed + numbers


def _splits(data: bytes) -> Iterator[int]:
    """Yield the places where an event may end, the last place first."""
    at = len(data)
    while (at := data.rfind(b"}", 0, at)) >= 0:
        if _SPLIT.match(data, at):
            yield at + 1


class _Reader(Generic[Event]):
    """A decoder of one file, with the bytes still to be decoded. The array of events may be in an object or bare."""

    def __init__(self, path: Path, kind: type[Event], header: Header) -> None:
        self._path = path
        self._header = header
        self._events: msgspec.json.Decoder[list[Event]] = msgspec.json.Decoder(list[kind])
        self._rest = b""
        self._in_object: bool | None = None
        self._wanted = BLOCK_BYTES
        self._done = 0

    def feed(self, block: bytes) -> list[Event]:
        """Return the events that this block completes."""
        self._rest += block
        if self._in_object is None and not self._open():
            self._check_length("no array of traceEvents")
            return []
        if len(self._rest) < self._wanted:
            return []
        return self._run()

    def finish(self) -> list[Event]:
        """Return the last events. Raises `FileError` if the file ends too early."""
        if self._in_object is None:
            if not self._rest.strip():
                raise FileError(f"{self._path}: empty (expected a Chrome trace)")
            kind = self._decode(self._rest, msgspec.json.Decoder(dict[str, msgspec.Raw]))
            raise FileError(f"{self._path}: traceEvents: missing (has {one_line(', '.join(kind)) or 'nothing'})")
        try:
            return self._last()
        except FileError:
            if not self._repair():
                raise
        return self._last()

    def _last(self) -> list[Event]:
        """Return the remaining events, and read the fields after the events."""
        if not self._in_object:
            return list(self._decode(b"[" + self._rest, self._events))
        tail = self._decode(b'{"":[' + self._rest, msgspec.json.Decoder(dict[str, msgspec.Raw]))
        self._note(tail)
        return list(self._decode(bytes(tail[""]), self._events))

    def _open(self) -> bool:
        """Skip to the first event, and return whether the array of events has begun."""
        start = self._rest[:64].lstrip()
        if start.startswith(b"["):
            self._in_object = False
            self._rest = self._rest[self._rest.index(b"[") + 1 :]
            return True
        for match in _OPEN.finditer(self._rest):
            try:
                head = msgspec.json.decode(self._rest[: match.start()] + b'"":0}', type=dict[str, msgspec.Raw])
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
                continue  # the key is in a string or in a nested object
            self._note(head)
            self._in_object = True
            self._rest = self._rest[match.end() :]
            return True
        return False

    def _run(self) -> list[Event]:
        """Return the complete events that end at a guessed split."""
        for split in itertools.islice(_splits(self._rest), _TRIES):
            try:
                found = self._events.decode(b"[" + self._rest[:split] + b"]")
            except msgspec.ValidationError as error:
                raise self._wrong(error) from None
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
                continue
            self._rest = self._rest[self._rest.index(b",", split) + 1 :]
            self._wanted = BLOCK_BYTES
            self._done += len(found)
            return found
        if self._repair():
            return self._run()
        self._check_length("one event")
        self._wanted = 2 * len(self._rest)
        return []

    def _repair(self) -> bool:
        """Repair values that are not JSON, and return whether there were any."""
        self._rest, changed = _repaired(self._rest)
        self._header.repaired += changed
        return changed > 0

    def _note(self, fields: dict[str, msgspec.Raw]) -> None:
        if "distributedInfo" in fields:
            self._header.distributed = self._decode(
                bytes(fields["distributedInfo"]), msgspec.json.Decoder(dict[str, Any])
            )

    def _check_length(self, what: str) -> None:
        if len(self._rest) > _LONGEST_BYTES:
            raise FileError(f"{self._path}: {what} in {_LONGEST_BYTES // 2**20} MiB (is this a Chrome trace?)")

    def _decode(self, data: bytes, decoder: msgspec.json.Decoder[Any]) -> Any:
        try:
            return decoder.decode(data)
        except msgspec.ValidationError as error:
            raise self._wrong(error) from None
        except RecursionError:
            raise FileError(f"{self._path}: nested too deeply") from None
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            reason = str(error).removeprefix("JSON is malformed: ")
            hint = "; cut off?" if "truncated" in reason else ""
            raise FileError(
                f"{self._path}: not JSON after {count(self._done, 'event')}: {one_line(reason)}{hint}"
            ) from None

    def _wrong(self, error: Exception) -> FileError:
        """Return an error with msgspec's message and the index of the event in the whole file."""

        def place(match: re.Match[str]) -> str:
            return f"traceEvents[{self._done + int(match.group(1))}]"

        return FileError(f"{self._path}: {one_line(_PLACE.sub(place, str(error)))}")
