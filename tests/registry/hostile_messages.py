"""Every field of a message as no honest peer sends it, made from the descriptors: a new field is there by itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

HUGE_LIST = 60_000
HUGE_TEXT = 1_000_000
_MARK = "\x01mark\x02"

_BORDERS: dict[int, tuple[int, ...]] = {
    FieldDescriptor.CPPTYPE_INT32: (0, -1, -(2**31), 2**31 - 1),
    FieldDescriptor.CPPTYPE_INT64: (0, -1, -(2**63), 2**63 - 1),
    FieldDescriptor.CPPTYPE_UINT32: (0, 2**31, 2**32 - 1),
    FieldDescriptor.CPPTYPE_UINT64: (0, 2**63, 2**64 - 1),
}
_FLOATS = (0.0, -0.0, -1.0, 1e-320, 1e38, float("inf"), float("-inf"), float("nan"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Hostile:
    """One message.

    Args:
        path: The field, as ``decode.layout.runs.num_layers``.
        what: What is wrong with it.
        payload: The message's bytes.
        inner: Names of the fields inside of the field.
    """

    path: str
    what: str
    payload: bytes
    inner: frozenset[str] = frozenset()

    def __str__(self) -> str:
        return f"{self.path} {self.what}"


def hostile_messages(message: Message, retell: Callable[[Any], None] | None = None) -> Iterator[Hostile]:
    """One change to one field each; `message` is honest, with something in every list.

    Args:
        retell: Has what the message says of itself (fingerprints) agree with it again: the change is then told a second time.
    """
    for path, what, payload in _changes(message, message, ""):
        inner = frozenset(_inner(message, path))
        yield Hostile(path=path, what=what, payload=payload, inner=inner)
        if retell is not None and what != "no UTF-8":
            changed = type(message).FromString(payload)
            retell(changed)
            again = changed.SerializeToString()
            if again != payload:
                yield Hostile(path=path, what=f"{what}, consistently", payload=again, inner=inner)
    yield Hostile(path="", what="empty", payload=b"")
    yield Hostile(path="", what="garbage", payload=b"\xff" * 64)
    yield Hostile(path="", what="cut", payload=message.SerializeToString()[:-1] or b"\x0a")


def _inner(message: Message, path: str) -> Iterator[str]:
    kind: Any = message.DESCRIPTOR
    for part in path.split("."):
        kind = kind.fields_by_name[part].message_type
    if kind is not None:
        for field in kind.fields:
            yield field.name
            if field.message_type is not None:
                yield from (one.name for one in field.message_type.fields)


def _changes(root: Message, message: Message, prefix: str) -> Iterator[tuple[str, str, bytes]]:
    """`message` is `root`, or lies in it."""
    untouched = type(message).FromString(message.SerializeToString())

    def back() -> None:
        message.CopyFrom(untouched)

    for field in message.DESCRIPTOR.fields:
        path = f"{prefix}{field.name}"
        is_map = field.message_type is not None and field.message_type.GetOptions().map_entry
        if field.containing_oneof is not None and not message.HasField(field.name):
            continue  # the other one of two inputs: told by the root that has it
        message.ClearField(field.name)
        yield path, "missing", root.SerializeToString()
        back()
        if is_map:
            changes = _map_changes(message, field)
        elif field.is_repeated:
            changes = _list_changes(message, field)
        elif field.message_type is not None:
            changes = iter(())
        else:
            changes = _value_changes(message, field)
        for what in changes:
            yield path, what, root.SerializeToString()
            back()
        if field.type == FieldDescriptor.TYPE_STRING and not field.is_repeated:
            setattr(message, field.name, _MARK)
            yield path, "no UTF-8", _marked(root)
            back()
        if field.message_type is not None and not is_map:
            inner = getattr(message, field.name)
            if field.is_repeated and len(inner):
                yield from _changes(root, inner[0], f"{path}.")
            elif not field.is_repeated and message.HasField(field.name):
                yield from _changes(root, inner, f"{path}.")


def _marked(root: Message) -> bytes:
    found = root.SerializeToString()
    assert _MARK.encode() in found
    return found.replace(_MARK.encode(), b"\xff\xfe" * 3)


def _value_changes(message: Message, field: FieldDescriptor) -> Iterator[str]:
    for value in _values(field):
        setattr(message, field.name, value)
        yield _named(value)


def _values(field: FieldDescriptor) -> tuple[Any, ...]:
    kind = field.cpp_type
    if kind in _BORDERS:
        return _BORDERS[kind]
    if kind in (FieldDescriptor.CPPTYPE_DOUBLE, FieldDescriptor.CPPTYPE_FLOAT):
        return _FLOATS
    if kind == FieldDescriptor.CPPTYPE_ENUM:
        return (0, 12345, -1)
    if kind == FieldDescriptor.CPPTYPE_BOOL:
        return (False, True)
    if field.type == FieldDescriptor.TYPE_BYTES:
        return (b"", b"\xff" * 8, b"\xdd\xff\xff\xff\xff" * 100, b"\x00" * HUGE_TEXT)
    return ("", "x" * 300, "é\x00\n\u2028" * 20, "x" * HUGE_TEXT)


def _named(value: Any) -> str:
    return repr(value) if len(repr(value)) < 24 else f"{type(value).__name__} of {len(value)}"


def _list_changes(message: Message, field: FieldDescriptor) -> Iterator[str]:
    items = getattr(message, field.name)
    honest = list(items)
    if honest:
        items.extend(honest)
        yield "everything twice"
        items = getattr(message, field.name)
        items.extend(honest * (HUGE_LIST // len(honest)))
        yield f"{HUGE_LIST} entries"
    if field.message_type is None:
        for value in _values(field):
            getattr(message, field.name).append(value)
            yield f"and {_named(value)}"


def _map_changes(message: Message, field: FieldDescriptor) -> Iterator[str]:
    """A map of texts, the only kind that there is."""
    for number in range(HUGE_LIST):
        getattr(message, field.name)[f"n{number}"] = "v"
    yield f"{HUGE_LIST} entries"
    for key, value in (("x" * HUGE_TEXT, "v"), ("k", "x" * HUGE_TEXT), ("", ""), ("a\nb", "c\nd\u2028e")):
        getattr(message, field.name)[key] = value
        yield f"and {_named(key)}: {_named(value)}"
