"""Workloads, clusters, plans and other values as JSON files: read strictly, written atomically, compared by hash."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import secrets
from pathlib import Path
from typing import Any, Literal, TypeAlias, TypeVar, get_args, get_origin, get_type_hints, overload

import msgspec

from legato.core.cluster import Cluster
from legato.core.errors import FileError
from legato.core.job import Job, Machine
from legato.core.measurement import Measurement
from legato.core.plan import Plan
from legato.core.program import Program
from legato.core.text import one_line
from legato.core.timeline import Timeline
from legato.core.workload import Workload
from legato.core.wrapping import Wrapping

__all__ = ["MOST_BYTES", "decode", "encode", "holds", "identity", "load", "read", "write", "write_bytes", "write_text"]

Noun = TypeVar("Noun", bound=msgspec.Struct)
AnyNoun: TypeAlias = Workload | Cluster | Plan | Timeline | Measurement | Wrapping | Job | Machine | Program
_NOUNS: dict[object, type[AnyNoun]] = {noun.__struct_config__.tag: noun for noun in get_args(AnyNoun)}

#: The largest file that is read. Real files have at most a hundredth of this, and `/dev/zero` has no end.
MOST_BYTES = 2**30
_BLOCK_BYTES = 2**20


#: The beginnings of traces: compressed data, an array of events, or an object that contains events. No file of legato
#: begins like this.
_TRACE = re.compile(
    rb"\x1f\x8b|\s*\[\s*\{\s*\"(?:ph|cat|name|ts|pid|tid)\"|(?=.{0,65536}\"traceEvents\"\s*:)\s*\{(?!\s*\"format\")",
    re.DOTALL,
)


class _Header(msgspec.Struct):
    """The first field of every file: the kind of value in it, and the version of the format."""

    format: msgspec.Raw = msgspec.Raw()


def encode(value: msgspec.Struct) -> bytes:
    """Return the value as JSON. Equal values give equal bytes."""
    return msgspec.json.encode(value)


def identity(value: msgspec.Struct) -> str:
    """Return a hash as 16 hexadecimal digits. Equal values have equal hashes. A workload keeps its hash."""
    kept: dict[str, str] = value.__dict__ if isinstance(value, Workload) else {}
    if "identity" not in kept:
        kept["identity"] = hashlib.sha256(encode(value)).hexdigest()[:16]
    return kept["identity"]


@overload
def decode(data: bytes, kind: None = None, source: str = "data") -> AnyNoun: ...
@overload
def decode(data: bytes, kind: type[Noun], source: str = "data") -> Noun: ...
def decode(data: bytes, kind: type[msgspec.Struct] | None = None, source: str = "data") -> msgspec.Struct:
    """Return the value that JSON bytes contain.

    The value has the type `kind`, or if that is None, the type that its `format` names. Error messages call the data by
    the name in `source`. Nothing in the data is executed. Raises `FileError` with one line that names the source, the
    field, the value and what was expected.
    """
    try:
        return _decode(data, _checked_kind(data, kind))
    except FileError as error:
        raise FileError(one_line(f"{source}: {error}")) from None


@overload
def read(path: str | os.PathLike[str], kind: None = None) -> Any: ...
@overload
def read(path: str | os.PathLike[str], kind: type[Noun]) -> Noun: ...
def read(path: str | os.PathLike[str], kind: type[msgspec.Struct] | None = None) -> msgspec.Struct:
    """Return the value that a file contains.

    The value has the type `kind`, or if that is None, the type that the file names. Raises `FileError` as `decode` and
    `load` do.
    """
    data = load(path)
    return decode(data, source=str(path)) if kind is None else decode(data, kind, str(path))


def holds(data: bytes, kind: type[AnyNoun]) -> bool:
    """Return whether the data names the type `kind` in its field `format`."""
    try:
        return _checked_kind(data, None) is kind
    except FileError:
        return False


def load(path: str | os.PathLike[str]) -> bytes:
    """Return all bytes of a file or pipe. Raises `FileError` if it is unreadable or has more than `MOST_BYTES`."""
    data = bytearray()
    try:
        with open(path, "rb") as file:
            while len(data) <= MOST_BYTES and (block := file.read(_BLOCK_BYTES)):
                data += block
    except (OSError, ValueError) as error:
        raise FileError(one_line(f"{path}: cannot read: {_reason(error)}")) from None
    if len(data) > MOST_BYTES:
        raise FileError(one_line(f"{path}: more than {MOST_BYTES // 2**20} MiB (too large for a legato file)"))
    return bytes(data)


def write(path: str | os.PathLike[str], value: msgspec.Struct) -> None:
    """Write a value to a file as JSON, atomically (see `write_bytes`). Raises `FileError` if writing fails."""
    try:
        text = encode(value).decode() + "\n"
    except ValueError as error:
        raise FileError(one_line(f"{path}: cannot write: {error}")) from None
    write_text(path, text)


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Write text to a file in UTF-8, atomically (see `write_bytes`)."""
    try:
        data = text.encode("utf-8")
    except ValueError as error:
        raise FileError(one_line(f"{path}: cannot write: {_reason(error)}")) from None
    write_bytes(path, data)


def write_bytes(path: str | os.PathLike[str], data: bytes) -> None:
    """Write bytes to a file atomically: if writing fails, the file keeps its old content.

    If the path exists and is not a regular file (`/dev/stdout`, a pipe), legato does not replace it, but writes the
    bytes into it. Raises `FileError` if writing fails.
    """
    temporary = None
    try:
        path = Path(path)
        if path.exists() and not path.is_file():
            path.write_bytes(data)
            return
        temporary = path.with_name(f".legato.{secrets.token_hex(8)}")
        temporary.write_bytes(data)
        os.replace(temporary, path)
    except (OSError, ValueError) as error:
        raise FileError(one_line(f"{path}: cannot write: {_reason(error)}")) from None
    finally:
        if temporary is not None:
            with contextlib.suppress(OSError, ValueError):
                temporary.unlink()


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error)


def _checked_kind(data: bytes, kind: type[msgspec.Struct] | None) -> type[msgspec.Struct]:
    """Return the type that `format` names. Raises `FileError` if the type is unknown, or not the given `kind`."""
    known = _NOUNS if kind is None else {kind.__struct_config__.tag: kind}
    if None in known:
        return known[None]
    if _TRACE.match(data):
        raise FileError(
            "a trace (`legato advise` reads traces of torch.profiler, and `legato import` makes a workload of a trace)"
        )
    found = bytes(_decode(data, _Header).format).decode(errors="replace")
    for tag, noun in known.items():
        if found == f'"{tag}"':
            return noun
    expected = " or ".join(f'"{tag}"' for tag in known)
    raise FileError(f"format: {_short(found) or 'missing'} (expected {expected})")


def _decode(data: bytes, kind: type[Noun]) -> Noun:
    """Decode like `msgspec.json.decode`, but raise `FileError` on wrong data; its message does not name the source."""
    try:
        return msgspec.json.decode(data, type=kind)
    except msgspec.ValidationError as error:
        raise FileError(_explain(str(error), data, kind)) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise FileError(_malformed(data, error)) from None
    except RecursionError:
        raise FileError("nested too deeply") from None


def _malformed(data: bytes, error: Exception) -> str:
    """Say why the bytes are not JSON text."""
    if data.startswith(b"\xef\xbb\xbf"):
        return "not JSON: a byte order mark (expected UTF-8 without one)"
    try:
        data.decode()
    except UnicodeDecodeError as bad:
        return f"not UTF-8: {bad.reason} at byte {bad.start}"
    return f"not JSON: {str(error).removeprefix('JSON is malformed: ')}"


def _explain(message: str, data: bytes, kind: type) -> str:
    """Turn msgspec's message into `field: value (expected ...)`."""
    match = re.fullmatch(r"(.*?)(?: - at `(\$[^`]*)`)?", message, re.DOTALL)
    assert match is not None
    what = match.group(1)
    where, text, expected = _locate(data, kind, (match.group(2) or "$")[1:])
    prefix = f"{where}." if where else ""
    if field := re.fullmatch(r"Object missing required field `(.*)`", what, re.DOTALL):
        return f"{prefix}{field.group(1)}: missing (required)"
    if field := re.fullmatch(r"Object contains unknown field `(.*)`", what, re.DOTALL):
        known = getattr(expected, "__struct_fields__", ["another"])
        return f"{prefix}{field.group(1)}: unknown field (expected {', '.join(known)})"
    if get_origin(expected) is Literal:
        return f"{where}: {text} (expected one of {', '.join(map(repr, get_args(expected)))})"
    if what.startswith(("Expected ", "Invalid ", "Number ", "Integer ")):
        reason = what.split(", got")[0].replace("`", "").replace(" | ", " or ")
        return f"{where or 'file'}: {text} ({reason[0].lower()}{reason[1:]})"
    # The message comes from the type's own check. A message about one field starts with the name of the field.
    return f"{prefix if re.match(r'[a-z_]+[:[]', what) else prefix[:-1] + ': ' if prefix else ''}{what}"


def _locate(data: bytes, kind: Any, path: str) -> tuple[str, str, Any]:
    """Return (name, text, expected type) of the place that msgspec's path refers to."""
    where = ""
    try:
        for name, index in re.findall(r"\.([^.\[\]]+)|\[([^\]]*)\]", path):
            if name:
                where += f".{name}"
                data, kind = msgspec.json.decode(data, type=dict[str, msgspec.Raw])[name], get_type_hints(kind)[name]
            elif index == "...":
                kind = get_args(kind)[-1]
                children = msgspec.json.decode(data, type=dict[str, msgspec.Raw])
                key = next(key for key, child in children.items() if not _fits(child, kind))
                where, data = f"{where}[{json.dumps(key)}]", children[key]
            else:
                where += f"[{index}]"
                data, kind = msgspec.json.decode(data, type=list[msgspec.Raw])[int(index)], get_args(kind)[0]
        text = _short(bytes(data).decode().strip())
    except (LookupError, StopIteration, ValueError, TypeError, RecursionError):
        return path.removeprefix("."), "a value", None
    return where.removeprefix("."), {"[": "an array", "{": "an object"}.get(text[0], text), kind


def _fits(data: bytes, kind: Any) -> bool:
    try:
        msgspec.json.decode(data, type=kind)
    except msgspec.ValidationError:
        return False
    return True


def _short(text: str) -> str:
    return text if len(text) <= 60 else f"{text[:57]}..."
