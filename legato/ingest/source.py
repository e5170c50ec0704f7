"""Read a trace file in blocks: plain or gzip, with progress, and with protection against gzip bombs."""

from __future__ import annotations

import functools
import gzip
import os
import re
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Concatenate, ParamSpec, TypeVar

from legato.core.errors import FileError, InputError

__all__ = [
    "MOST_BYTES",
    "Progress",
    "in_folders",
    "named",
    "one_line",
    "read_all",
    "read_blocks",
    "refusals_name_files",
    "title_of",
]

Options = ParamSpec("Options")
Result = TypeVar("Result")

#: A callback `progress(done, total)`, in bytes of the file on disk.
Progress = Callable[[int, int], None]

_ENDINGS = (".json", ".json.gz")
#: The beginning of legato's own files, and the end of its traces for Perfetto.
_OWN, _OWN_TRACE, _EDGE_BYTES = re.compile(rb'\s*\{\s*"format"\s*:\s*"legato\.'), b'"producer": "legato"', 256
BLOCK_BYTES = 4 * 2**20
#: Gzip compresses traces 10- to 40-fold; deflate reaches at most 1032-fold, on constant data.
_BOMB_RATIO = 200
_BOMB_FLOOR_BYTES = 64 * 2**20
#: The most bytes of a trace that is read into memory as a whole, after decompression.
MOST_BYTES = 2**30


def in_folders(paths: Sequence[Path], say: Callable[[str], None]) -> list[Path]:
    """Return the files, with each folder replaced by its files that are named like traces.

    Files that legato itself has written into a folder are left out, and `say` is called with a line about them. Raises
    `FileError` if a folder has no traces.
    """
    found: list[Path] = []
    for path in paths:
        try:
            files = sorted(f for f in path.iterdir() if f.name.endswith(_ENDINGS)) if path.is_dir() else [path]
            own = [file for file in files if path.is_dir() and _is_own(file)]
        except OSError as error:
            raise FileError(f"{path}: cannot read: {error.strerror or error}") from None
        if own:
            say(f"left out, because legato has written it: {named(own)}")
            files = [file for file in files if file not in own]
        if not files:
            raise FileError(f"{path}: no traces in this folder (expected names that end in {' or '.join(_ENDINGS)})")
        found += files
    return found


def _is_own(path: Path) -> bool:
    """Return whether legato has written this file, such as a workload, a plan, or a trace for Perfetto."""
    with path.open("rb") as file:
        begins = file.read(_EDGE_BYTES)
        file.seek(max(0, file.seek(0, os.SEEK_END) - _EDGE_BYTES))
        return _OWN.match(begins) is not None or _OWN_TRACE in file.read(_EDGE_BYTES)


def read_blocks(path: Path, progress: Progress | None = None, limit: int | None = None) -> Iterator[bytes]:
    """Yield the bytes of the file in blocks of a few MiB, decompressed if the file begins like gzip.

    Raises `FileError` if the file cannot be read, is damaged, expands more than 200-fold, or has more than `limit`
    bytes.
    """
    try:
        total = path.stat().st_size
        with path.open("rb") as file:
            if not file.seekable():
                raise FileError(f"{path}: a pipe (expected a file, because a trace is read twice)")
            packed = file.read(2) == b"\x1f\x8b"
            file.seek(0)
            stream = gzip.GzipFile(fileobj=file) if packed else file
            expanded = 0
            while block := stream.read(BLOCK_BYTES):
                expanded += len(block)
                if packed and expanded > max(_BOMB_FLOOR_BYTES, _BOMB_RATIO * total):
                    raise FileError(f"{path}: gzip data that expands more than {_BOMB_RATIO}-fold (no trace does)")
                if limit is not None and expanded > limit:
                    raise FileError(f"{path}: more than {limit // 2**20} MiB (too large for this kind of trace)")
                if progress is not None and total:
                    progress(min(file.tell(), total), total)
                yield block
    except FileError:
        raise
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise FileError(f"{path}: damaged gzip data: {one_line(str(error))}") from None
    except OSError as error:
        raise FileError(f"{path}: cannot read: {error.strerror or error}") from None
    except ValueError as error:  # the name has a null character
        raise FileError(f"{one_line(str(path))}: cannot read: {error}") from None


def read_all(path: Path, progress: Progress | None = None) -> bytes:
    """Return all bytes of a file. Raises `FileError` if the file has more than `MOST_BYTES`."""
    return b"".join(read_blocks(path, progress, MOST_BYTES))


def named(paths: Sequence[Path]) -> str:
    """Return the name of the first file, followed by the number of the other files."""
    first = one_line(str(paths[0]), 300) if paths else "no files"
    return first if len(paths) < 2 else f"{first} and {len(paths) - 1} more"


def refusals_name_files(
    read: Callable[Concatenate[Sequence[Path], Options], Result],
) -> Callable[Concatenate[Sequence[Path], Options], Result]:
    """Return the reader, wrapped to add the names of its files to errors that name no file."""

    @functools.wraps(read)
    def named_read(paths: Sequence[Path], /, *args: Options.args, **options: Options.kwargs) -> Result:
        try:
            return read(paths, *args, **options)
        except FileError:
            raise
        except InputError as error:
            raise FileError(f"{named(paths)}: {error}") from None

    return named_read


def title_of(path: Path) -> str:
    """Return a name for the workload of a trace, from the name of its file."""
    return one_line(path.name.partition(".")[0], 60) or "trace"


def one_line(text: str, limit: int = 120) -> str:
    """Return text from a file for an error message: printable, on one line, with at most `limit` characters."""
    clean = "".join(c if c.isprintable() else "?" for c in text)
    return clean if len(clean) <= limit else f"{clean[: limit - 3]}..."
