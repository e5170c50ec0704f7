"""The nouns as JSON files: strict to read, atomic to write, hashed to compare."""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from legato.core.errors import FileError

__all__ = ["decode", "encode", "identity", "read", "write", "write_text"]

Noun = TypeVar("Noun", bound=msgspec.Struct)


def encode(value: msgspec.Struct) -> bytes:
    """The value as JSON; equal values give equal bytes."""
    return msgspec.json.encode(value)


def identity(value: msgspec.Struct) -> str:
    """16 hexadecimal digits that differ when the values differ."""
    return hashlib.sha256(encode(value)).hexdigest()[:16]


def decode(data: bytes, kind: type[Noun], source: str = "data") -> Noun:
    """A value from JSON bytes; `source` names them in the error.

    Nothing in the data is executed. Raises `FileError` with one line that
    names the source, the field, the value and what was expected.
    """
    try:
        return msgspec.json.decode(data, type=kind)
    except msgspec.ValidationError as error:
        raise FileError(f"{source}: {_explain(str(error), data)}") from None
    except msgspec.DecodeError as error:
        raise FileError(f"{source}: not JSON: {error}") from None
    except UnicodeDecodeError as error:
        raise FileError(f"{source}: not UTF-8: {error.reason} at byte {error.start}") from None
    except RecursionError:
        raise FileError(f"{source}: nested too deeply") from None


def read(path: str | os.PathLike[str], kind: type[Noun]) -> Noun:
    """A value from a file. Raises `FileError` as `decode` does, or when the file cannot be read."""
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise FileError(f"{path}: {error.strerror or error}") from None
    return decode(data, kind, str(path))


def write(path: str | os.PathLike[str], value: msgspec.Struct) -> None:
    """Write a value so that the file is either the old one or the whole new one."""
    write_text(path, encode(value).decode() + "\n")


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Write text so that the file is either the old one or the whole new one."""
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        temporary.write_text(text, encoding="utf-8")
        os.replace(temporary, path)
    except OSError as error:
        raise FileError(f"{path}: cannot write: {error.strerror or error}") from None
    finally:
        temporary.unlink(missing_ok=True)


def _explain(message: str, data: bytes) -> str:
    """msgspec's message, turned to `field: value (what was expected)`."""
    match = re.fullmatch(r"(.*?)(?: - at `(.*)`)?", message, re.DOTALL)
    assert match is not None
    what, path = match.group(1), (match.group(2) or "$").removeprefix("$").removeprefix(".")
    if not what.startswith(("Expected", "Object", "Invalid")):
        return f"{path + '.' if path else ''}{what}"
    value = _value_at(data, path)
    expected = re.sub(r", got `[^`]*`", "", what.replace("Expected", "expected").replace("`", ""))
    return f"{path or 'file'}: {value}({expected})"


def _value_at(data: bytes, path: str) -> str:
    """The offending value, cut short, or nothing if it cannot be shown."""
    try:
        value: Any = json.loads(data)
        for key, index in re.findall(r"([^.\[\]]+)|\[(\d+)\]", path):
            value = value[int(index)] if index else value[key]
        if isinstance(value, dict | list):
            return ""
        text = json.dumps(value)
    except (ValueError, KeyError, IndexError, TypeError, RecursionError):
        return ""
    return f"{text if len(text) <= 60 else text[:57] + '...'} "
