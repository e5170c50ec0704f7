"""The messages of a Chakra execution trace as protobuf classes.

The field numbers come from MLCommons Chakra's `et_def.proto`. A file has one `GlobalMetadata`, followed by `Node`s. The
descriptor is built in Python, so no generated module and no protobuf compiler are needed.
"""

from __future__ import annotations

from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

__all__ = ["COLLECTIVES", "COMPUTE", "MEMORY", "METADATA", "SEND_RECEIVE", "TRANSFER", "GlobalMetadata", "Node"]

_Field = descriptor_pb2.FieldDescriptorProto

#: Values of `Node.type`.
METADATA, MEMORY, COMPUTE, SEND_RECEIVE, TRANSFER = 1, (2, 3), 4, (5, 6), 7

#: Values of the attribute `comm_type`.
COLLECTIVES = (
    "all_reduce",
    "reduce",
    "all_gather",
    "gather",
    "scatter",
    "broadcast",
    "all_to_all",
    "reduce_scatter",
    "reduce_scatter_block",
    "barrier",
)

#: The value of an attribute has one of these types, or is a list of one type. From index 3 on, each type has two field
#: numbers.
_VALUES = (
    "double", "float", "int32", "int64", "uint32", "uint64", "sint32", "sint64",
    "fixed32", "fixed64", "sfixed32", "sfixed64", "bool", "string", "bytes",
)  # fmt: skip
_FIRST_VALUE = 3


def _file() -> descriptor_pb2.FileDescriptorProto:
    file = descriptor_pb2.FileDescriptorProto(name="legato/chakra.proto", package="legato.chakra", syntax="proto3")
    attribute = [("name", 1, "string"), ("doc_string", 2, "string")]
    for i, value in enumerate(_VALUES):
        _message(file, f"List_{value}", [("values", 1, f"*{value}")])
        attribute += [(f"{value}_val", _FIRST_VALUE + 2 * i, value)]
        attribute += [(f"{value}_list", _FIRST_VALUE + 2 * i + 1, f"List_{value}")]
    _message(file, "Attribute", attribute, one_of=2)
    _message(file, "IOInfo", [("values", 1, "string"), ("shapes", 2, "string"), ("types", 3, "string")])
    node = [("id", 1, "uint64"), ("name", 2, "string"), ("type", 3, "int32"), ("ctrl_deps", 4, "*uint64")]
    node += [("data_deps", 5, "*uint64"), ("start_time_micros", 6, "uint64"), ("duration_micros", 7, "uint64")]
    node += [("inputs", 8, "IOInfo"), ("outputs", 9, "IOInfo"), ("attr", 10, "*Attribute")]
    _message(file, "Node", node)
    _message(file, "GlobalMetadata", [("version", 1, "string"), ("attr", 2, "*Attribute")])
    return file


def _message(
    file: descriptor_pb2.FileDescriptorProto, name: str, fields: list[tuple[str, int, str]], one_of: int | None = None
) -> None:
    """Add a message type. A `*` before a type marks a repeated field. Fields from index `one_of` on are a `oneof`."""
    message = file.message_type.add(name=name)
    if one_of is not None:
        message.oneof_decl.add(name="value")
    for i, (field, number, kind) in enumerate(fields):
        repeated, kind = kind.startswith("*"), kind.removeprefix("*")
        label = _Field.LABEL_REPEATED if repeated else _Field.LABEL_OPTIONAL
        added = message.field.add(name=field, number=number, label=label)
        if kind in _VALUES:
            added.type = _Field.Type.Value(f"TYPE_{kind.upper()}")
        else:
            added.type, added.type_name = _Field.TYPE_MESSAGE, f".legato.chakra.{kind}"
        if one_of is not None and i >= one_of:
            added.oneof_index = 0


_pool = descriptor_pool.DescriptorPool()
_pool.Add(_file())

Node: Any = message_factory.GetMessageClass(_pool.FindMessageTypeByName("legato.chakra.Node"))
GlobalMetadata: Any = message_factory.GetMessageClass(_pool.FindMessageTypeByName("legato.chakra.GlobalMetadata"))
