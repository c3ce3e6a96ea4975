"""Message tables: protobuf messages declared in Python instead of generated code.

A table maps each message to its fields: number, name, type. `*` marks a repeated field, `%` a map from text, `|` the
field's oneof, `?` a field whose absence differs from its default. A type is a scalar, an enumeration or a message.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

_Field = descriptor_pb2.FieldDescriptorProto
_SCALARS = {
    "bool": _Field.TYPE_BOOL,
    "bytes": _Field.TYPE_BYTES,
    "double": _Field.TYPE_DOUBLE,
    "enum": _Field.TYPE_INT32,
    "fixed32": _Field.TYPE_FIXED32,
    "fixed64": _Field.TYPE_FIXED64,
    "float": _Field.TYPE_FLOAT,
    "int32": _Field.TYPE_INT32,
    "int64": _Field.TYPE_INT64,
    "string": _Field.TYPE_STRING,
    "uint32": _Field.TYPE_UINT32,
    "uint64": _Field.TYPE_UINT64,
}
"""`enum`: an enumeration whose names are not needed, a number as on the wire."""


def file_of(
    name: str, package: str, table: Mapping[str, str], enums: Mapping[str, Sequence[str]] | None = None
) -> descriptor_pb2.FileDescriptorProto:
    """Return a table as a protobuf file descriptor. `enums` maps enumerations to their names, numbered from 0."""
    file = descriptor_pb2.FileDescriptorProto(name=name, package=package, syntax="proto3")
    for kind, values in (enums or {}).items():
        enum = file.enum_type.add(name=kind)
        for number, value in enumerate(values):
            enum.value.add(name=value, number=number)
    made: dict[str, Any] = {}
    for full in sorted(table, key=lambda full: full.count(".")):  # Enclosing messages come first.
        outer, _, inner = full.rpartition(".")
        message = made[full] = made[outer].nested_type.add() if outer else file.message_type.add()
        message.name = inner
        for field in filter(None, table[full].split(",")):
            number_text, field_name, kind = field.split()
            _add(message, package, full, (int(number_text), field_name, kind), frozenset(enums or ()))
    return file


def _add(message: Any, package: str, full: str, declared: tuple[int, str, str], enums: frozenset[str]) -> None:
    number, name, kind = declared
    kind, _, choice = kind.partition("|")
    field = message.field.add(name=name, number=number, label=_Field.LABEL_OPTIONAL)
    if kind.endswith("*"):
        field.label, kind = _Field.LABEL_REPEATED, kind[:-1]
    if kind.endswith("?"):
        choice, kind, field.proto3_optional = f"_{name}", kind[:-1], True
    if choice:
        choices = [one.name for one in message.oneof_decl]
        if choice not in choices:
            message.oneof_decl.add(name=choice)
        field.oneof_index = choices.index(choice) if choice in choices else len(choices)
    if kind.endswith("%"):
        entry = message.nested_type.add(name=f"{name.title().replace('_', '')}Entry")
        entry.options.map_entry = True
        _add(entry, package, full, (1, "key", "string"), enums)
        _add(entry, package, full, (2, "value", kind[:-1]), enums)
        field.label, field.type = _Field.LABEL_REPEATED, _Field.TYPE_MESSAGE
        field.type_name = f".{package}.{full}.{entry.name}"
    elif kind in _SCALARS:
        field.type = _SCALARS[kind]
    else:
        field.type = _Field.TYPE_ENUM if kind in enums else _Field.TYPE_MESSAGE
        field.type_name = f".{package}.{kind}"


def classes_of(file: descriptor_pb2.FileDescriptorProto) -> dict[str, Any]:
    """Return the classes of all messages by name, created in a pool of their own.

    Another copy of the same messages may then exist in the program.
    """
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)

    def names(messages: Any, prefix: str) -> list[str]:
        return [
            found
            for message in messages
            if not message.options.map_entry
            for found in (prefix + message.name, *names(message.nested_type, f"{prefix}{message.name}."))
        ]

    return {
        name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{file.package}.{name}"))
        for name in names(file.message_type, "")
    }
