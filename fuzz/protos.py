"""Changing protobuf messages by their descriptors, so that a new field is changed without anybody thinking of it."""

from __future__ import annotations

import random
from typing import Any, cast

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from fuzz.trees import BORDERS, FLOATS, LONG, TEXTS, changed_bytes

_INTEGERS = {
    FieldDescriptor.CPPTYPE_INT32: (-(2**31), 2**31 - 1),
    FieldDescriptor.CPPTYPE_INT64: (-(2**63), 2**63 - 1),
    FieldDescriptor.CPPTYPE_UINT32: (0, 2**32 - 1),
    FieldDescriptor.CPPTYPE_UINT64: (0, 2**64 - 1),
}


def changed_message(message: Message, rng: random.Random) -> None:
    """Change one to three fields of the message, or of one inside it."""
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        _change(message, rng)


def _change(message: Message, rng: random.Random) -> None:
    fields: list[FieldDescriptor] = list(cast(Any, message.DESCRIPTOR).fields)
    if not fields:
        return
    field = rng.choice(fields)
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        _change_map(getattr(message, field.name), rng)
    elif field.is_repeated:
        _change_list(getattr(message, field.name), field, rng)
    elif field.message_type is not None:
        if rng.random() < 0.08:
            message.ClearField(field.name)
        else:
            _change(getattr(message, field.name), rng)
    elif rng.random() < 0.05:
        message.ClearField(field.name)
    else:
        setattr(message, field.name, a_value(field, getattr(message, field.name), rng))


def a_value(field: FieldDescriptor, value: Any, rng: random.Random) -> Any:
    """A value for a plain field, often one near to `value`."""
    kind = field.cpp_type
    if kind in _INTEGERS:
        low, high = _INTEGERS[kind]
        near = value + rng.choice((-1, 1, 256, -256)) if rng.random() < 0.3 else rng.choice((*BORDERS, low, high))
        return min(max(near, low), high)
    if kind in (FieldDescriptor.CPPTYPE_DOUBLE, FieldDescriptor.CPPTYPE_FLOAT):
        return rng.choice(FLOATS)
    if kind == FieldDescriptor.CPPTYPE_BOOL:
        return not value
    if field.type == FieldDescriptor.TYPE_BYTES:
        return changed_bytes(value, rng)
    if kind == FieldDescriptor.CPPTYPE_STRING:
        return rng.choice((rng.choice(TEXTS), "x" * rng.choice(LONG), value + "x", value[1:], value.upper()))
    return rng.choice((0, 1, 2, 7, 2**31 - 1))  # an enum


def _change_list(items: Any, field: FieldDescriptor, rng: random.Random) -> None:
    choice = rng.randrange(6)
    if len(items) and choice == 0:
        del items[rng.randrange(len(items))]
    elif len(items) and choice == 1:
        items.append(items[rng.randrange(len(items))])
    elif len(items) and choice == 2:
        items.extend(list(items)[:200] * rng.choice((1, 2, 40)))
    elif field.message_type is not None:
        _change(items[rng.randrange(len(items))] if len(items) and choice != 3 else items.add(), rng)
    elif len(items) and choice != 3:
        at = rng.randrange(len(items))
        items[at] = a_value(field, items[at], rng)
    else:
        items.append(a_value(field, field.default_value if not field.is_repeated else _zero(field), rng))


def _zero(field: FieldDescriptor) -> Any:
    if field.type == FieldDescriptor.TYPE_BYTES:
        return b""
    return "" if field.cpp_type == FieldDescriptor.CPPTYPE_STRING else 0


def _change_map(items: Any, rng: random.Random) -> None:
    """A map of texts, the only kind that there is."""
    names = sorted(items)  # their own order is another one in each process
    choice = rng.randrange(4)
    if names and choice == 0:
        del items[rng.choice(names)]
    elif names and choice == 1:
        items[rng.choice(names)] = rng.choice((rng.choice(TEXTS), "x" * rng.choice(LONG)))
    elif choice == 2:
        for number in range(rng.choice((1, 2, 255, 300))):
            items[f"n{number}"] = "v"
    else:
        items[rng.choice((rng.choice(TEXTS), "x" * rng.choice(LONG)))] = rng.choice(TEXTS)
