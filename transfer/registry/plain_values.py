"""Messages of the wire contract as plain values for JSON: every field under its name in the contract, also if it is 0."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from typing import Any, Final, cast

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

_EMPTY_WHERE_ABSENT: Final = ("InstanceInfo", "ShardInfo")
"""Messages that a node without ranks lacks; readers see empty fields and need no check."""

NOT_SHOWN: Final = ("layout", "kv_scales")
"""Fields of an InstanceInfo with an entry for every layer; its fingerprint stands for them."""


def plain(message: Message, *, without: Collection[str] = NOT_SHOWN) -> dict[str, Any]:
    """Return a message as a dictionary.

    Ids of lives and sessions are text, 0x and 16 hex digits, because readers of JSON would round them. Absent fields are None,
    and so are NaN and infinities, which JSON lacks. An absent InstanceInfo or ShardInfo has empty fields.

    Args:
        without: Fields to leave out, of any message.
    """
    return {field.name: _value(message, field, without) for field in message.DESCRIPTOR.fields if field.name not in without}


def _value(message: Message, field: Any, without: Collection[str]) -> Any:
    if field.has_presence and not message.HasField(field.name):
        is_empty = field.message_type is not None and field.message_type.name in _EMPTY_WHERE_ABSENT
        return plain(getattr(message, field.name), without=without) if is_empty else None
    value = getattr(message, field.name)
    if isinstance(value, Message):
        return plain(value, without=without)
    if isinstance(value, str | bytes | int | float):
        return _scalar(value, field)
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        return dict(cast("Mapping[str, str]", value))
    return [
        plain(one, without=without) if isinstance(one, Message) else _scalar(one, field) for one in cast("Iterable[Any]", value)
    ]


def _scalar(value: Any, field: Any) -> Any:
    if field.type == FieldDescriptor.TYPE_FIXED64:
        return f"{value:#018x}"
    if isinstance(value, bytes):
        return value.hex()
    return None if isinstance(value, float) and not math.isfinite(value) else value
