"""Read and write the framing of Chakra `.et` files: each protobuf message comes after its length (a varint)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from google.protobuf.message import DecodeError

from legato.core.errors import FileError
from legato.core.text import count
from legato.ingest.chakra.schema import GlobalMetadata, Node
from legato.ingest.source import MOST_BYTES, Progress, one_line, read_blocks

__all__ = ["TraceNode", "frame", "read_nodes"]

#: A longer message is an error. A node has a few hundred bytes, or a few thousand with long lists of tensors.
_LONGEST_BYTES = 16 * 2**20
_LARGEST = 2**62


@dataclass(frozen=True)
class TraceNode:
    """The fields of a node that legato uses; `micros` is its duration in microseconds."""

    id: int
    name: str
    type: int
    ctrl_deps: tuple[int, ...]
    data_deps: tuple[int, ...]
    start_micros: int
    micros: int
    attributes: dict[str, Any]


def frame(message: Any) -> bytes:
    """Return the bytes of a message in a file: the message's length, then the message."""
    data = message.SerializeToString()
    length, head = len(data), bytearray()
    while length > 127:
        head.append(length & 127 | 128)
        length >>= 7
    head.append(length)
    return bytes(head) + bytes(data)


def read_nodes(path: Path, progress: Progress | None = None) -> list[TraceNode]:
    """Read the nodes of a file in file order. Raises `FileError` if the file is no Chakra trace or repeats an id."""
    nodes: list[TraceNode] = []
    seen = set()
    for number, data in enumerate(_messages(path, read_blocks(path, progress, MOST_BYTES))):
        try:
            message = (Node if number else GlobalMetadata).FromString(data)
        except (DecodeError, ValueError, RecursionError):
            what = "Node" if number else "GlobalMetadata"
            raise FileError(
                f"{path}: message {number}: {count(len(data), 'byte')} (expected a {what} of a Chakra trace)"
            ) from None
        if not number:
            continue
        node = _node(message)
        if node.id in seen:
            raise FileError(f"{path}: node id {node.id} occurs twice ({one_line(node.name, 60)!r})")
        if node.micros > _LARGEST or node.start_micros > _LARGEST:
            raise FileError(f"{path}: node {node.id}: duration_micros: {node.micros} (expected less than 2**62)")
        seen.add(node.id)
        nodes.append(node)
    if not nodes:
        raise FileError(f"{path}: no nodes (expected a Chakra execution trace)")
    return nodes


def _messages(path: Path, data: Iterable[bytes]) -> Iterator[bytes]:
    """Yield the messages without their lengths."""
    rest, at = b"", 0
    for block in data:
        rest, at = rest[at:] + block, 0
        while (found := _length(path, rest, at)) is not None and found[1] + found[0] <= len(rest):
            yield rest[found[1] : found[1] + found[0]]
            at = found[0] + found[1]
    if at < len(rest):
        raise FileError(
            f"{path}: cut off: {count(len(rest) - at, 'byte')} of an incomplete message (expected a Chakra trace)"
        )


def _length(path: Path, data: bytes, at: int) -> tuple[int, int] | None:
    """Return (length, position of the message), or None if the varint is incomplete."""
    length = 0
    for shift, byte in enumerate(data[at : at + 5]):
        length |= (byte & 127) << 7 * shift
        if byte < 128:
            if length > _LONGEST_BYTES:
                break
            return length, at + shift + 1
    else:
        if len(data) - at < 5:
            return None
    raise FileError(f"{path}: a message of more than {_LONGEST_BYTES // 2**20} MiB (is this a Chakra trace?)")


def _node(message: Any) -> TraceNode:
    attributes = {}
    for attribute in message.attr:
        which = attribute.WhichOneof("value")
        if which is not None and not which.endswith("_list"):
            attributes[attribute.name] = getattr(attribute, which)
    return TraceNode(
        message.id,
        message.name,
        message.type,
        tuple(message.ctrl_deps),
        tuple(message.data_deps),
        message.start_time_micros,
        message.duration_micros,
        attributes,
    )
