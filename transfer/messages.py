"""The control messages between a prefill rank and a decode rank, and their bytes.

On the wire a message is one msgpack array: ``[version, tag, incarnation, field, field, ...]``, fields in the order in which
the classes below declare them, nested values as arrays of their own fields. Positions instead of names halve both size
and time; `PROTOCOL_VERSIONS` is what may change them.

========================  ===  ==================  ==========================================================================
message                   tag  direction           says
========================  ===  ==================  ==========================================================================
`GrantRequest`              1  prefill -> decode   give me grants for these chunks of one route (repeated until answered)
`ChunkReady`                2  prefill -> decode   the bytes of this grant have been written
`WriterDrained`             3  prefill -> decode   no write of this request is under way on this route, and none will come
`GrantsIssued`              4  decode -> prefill   the grants; a repeated request gets the same ones
`GrantRefused`              5  decode -> prefill   there will be none: the request cannot be served here
`ChunkRejected`             6  decode -> prefill   the bytes arrived broken: send them again
`AbortTransfer`             7  decode -> prefill   stop writing, then say `WriterDrained` (repeated until it came)
========================  ===  ==================  ==========================================================================

The names are immutable values: equal when all fields are. A field out of range can be neither built nor decoded.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Annotated, Any, ClassVar, Final, Self

import msgpack
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from transfer.errors import RemoteProtocolError

PROTOCOL_VERSION: Final = 1
PROTOCOL_VERSIONS: Final = (PROTOCOL_VERSION,)
"""Versions that this build speaks, ascending; both sides of a session use the highest common one. With a second one `encode()`
has to be told the session's."""

MAX_MESSAGE_BYTES: Final = 1 << 16
"""Twice the largest message that there is, a `GrantsIssued` of `MAX_CHUNKS_PER_MESSAGE` grants."""

MAX_CHUNKS_PER_MESSAGE: Final = 1024
MAX_REASON_CHARS: Final = 512
MAX_REQUEST_ID_CHARS: Final = 128

_UINT64_MAX: Final = (1 << 64) - 1

_SHORT_ARRAY: Final = 32  # more than any message has fields, and grants of a usual request
_LIMITS: Final = {"use_list": False, "max_str_len": 4 * MAX_REASON_CHARS, "max_bin_len": 0, "max_map_len": 0, "max_ext_len": 0}

Uint64 = Annotated[int, Field(ge=0, le=_UINT64_MAX)]
PositiveUint64 = Annotated[int, Field(ge=1, le=_UINT64_MAX)]
RequestId = Annotated[str, Field(min_length=1, max_length=MAX_REQUEST_ID_CHARS)]
Reason = Annotated[str, Field(max_length=MAX_REASON_CHARS)]


class _Frozen(BaseModel):
    """Strict and immutable. Unknown fields are rejected."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", hide_input_in_errors=True)


class ChunkSize(_Frozen):
    """A chunk whose grant is requested.

    Args:
        chunk: `Chunk.index` in the request.
        num_bytes: Payload on this route, in bytes, above 0.
    """

    chunk: Uint64
    num_bytes: PositiveUint64


class IssuedGrant(_Frozen):
    """The grant of one chunk on one route: positions [begin, end) of the decode rank's ring."""

    chunk: Uint64
    begin: Uint64
    end: Uint64

    @model_validator(mode="after")
    def _check_range(self) -> Self:
        if self.begin >= self.end:
            raise ValueError(f"grant [{self.begin}, {self.end}) is empty or negative; begin must be below end")
        return self


class _Message(_Frozen):
    """Fields of all messages.

    Args:
        incarnation: The sender's life, above 0. A receiver drops messages of an unknown life.
        request_id: The transfer, 1 to 128 characters.
    """

    tag: ClassVar[int]

    incarnation: PositiveUint64
    request_id: RequestId


class _RouteMessage(_Message):
    """A message about one route.

    Args:
        route: `Route.index`; names the writer.
    """

    route: Uint64


class GrantRequest(_RouteMessage):
    """Prefill rank: give me grants for these chunks of one route. Sent again until answered.

    Args:
        chunks: 1 to 1024 chunks, none twice.
    """

    tag: ClassVar[int] = 1

    chunks: Annotated[tuple[ChunkSize, ...], Field(min_length=1, max_length=MAX_CHUNKS_PER_MESSAGE)]

    @model_validator(mode="after")
    def _check_chunks(self) -> Self:
        if len({wanted.chunk for wanted in self.chunks}) != len(self.chunks):
            raise ValueError("chunks names a chunk twice; each must be there once")
        return self


class ChunkReady(_RouteMessage):
    """Prefill rank: the bytes of this grant have been written.

    Args:
        chunk: `Chunk.index` in the request.
        begin: Position at which the grant begins; names the grant.
        num_bytes: Payload written, in bytes.
        digest: 64-bit digest of the payload.
        attempt: 0 for the first time, one more for each time it was sent again.
    """

    tag: ClassVar[int] = 2

    chunk: Uint64
    begin: Uint64
    num_bytes: PositiveUint64
    digest: Uint64
    attempt: Uint64


class WriterDrained(_RouteMessage):
    """Prefill rank: no write of this request is under way on this route, and none will come."""

    tag: ClassVar[int] = 3


class GrantsIssued(_RouteMessage):
    """Decode rank: the grants asked for. The answer to a repeated request is the same grants.

    Args:
        grants: 1 to 1024 grants, none for a chunk twice.
    """

    tag: ClassVar[int] = 4

    grants: Annotated[tuple[IssuedGrant, ...], Field(min_length=1, max_length=MAX_CHUNKS_PER_MESSAGE)]

    @model_validator(mode="after")
    def _check_grants(self) -> Self:
        if len({grant.chunk for grant in self.grants}) != len(self.grants):
            raise ValueError("grants names a chunk twice; each must be there once")
        return self


class GrantRefused(_RouteMessage):
    """Decode rank: there will be no grants for this request.

    Args:
        reason: One line for people, at most 512 characters; see `clip_reason`.
    """

    tag: ClassVar[int] = 5

    reason: Reason


class ChunkRejected(_RouteMessage):
    """Decode rank: the bytes of this attempt arrived broken; send the chunk again.

    Args:
        chunk: `Chunk.index` in the request.
        begin: Position at which the grant begins; names the grant, also to a writer that has forgotten the request.
        attempt: The attempt that was broken.
        reason: One line for people, at most 512 characters.
    """

    tag: ClassVar[int] = 6

    chunk: Uint64
    begin: Uint64
    attempt: Uint64
    reason: Reason


class AbortTransfer(_RouteMessage):
    """Decode rank: stop writing for this request, then say `WriterDrained`. Sent again until that came.

    Args:
        reason: One line for people, at most 512 characters.
    """

    tag: ClassVar[int] = 7

    reason: Reason


Message = GrantRequest | ChunkReady | WriterDrained | GrantsIssued | GrantRefused | ChunkRejected | AbortTransfer

MESSAGE_TYPES: Final[tuple[type[Message], ...]] = (
    GrantRequest,
    ChunkReady,
    WriterDrained,
    GrantsIssued,
    GrantRefused,
    ChunkRejected,
    AbortTransfer,
)


def clip_reason(text: str) -> str:
    """Return `text` as a one-line reason that every message accepts: clipped, with invalid characters replaced."""
    line = " ".join(text.encode("utf-8", "replace").decode().split())
    return line if len(line) <= MAX_REASON_CHARS else line[: MAX_REASON_CHARS - 1] + "…"


def encode(message: Message) -> bytes:
    """Return the message's bytes: always decodable, and under `MAX_MESSAGE_BYTES`."""
    return _CODECS[message.tag].pack(message)


def decode(payload: bytes) -> Message:
    """Return the message that a peer sent. Raise RemoteProtocolError for invalid bytes; the field at fault is named."""
    if len(payload) > MAX_MESSAGE_BYTES:
        raise RemoteProtocolError(f"message of {len(payload)} bytes; it can have at most {MAX_MESSAGE_BYTES}")
    try:
        parts = _unpacked(payload)
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        raise RemoteProtocolError(f"message of {len(payload)} bytes is not msgpack within its limits: {_brief(error)}") from error
    if type(parts) is not tuple or len(parts) < _NUM_HEADER_PARTS:
        raise RemoteProtocolError(f"message is {_shape(parts)}; it must be an array [version, tag, incarnation, ...]")
    if type(parts[0]) is not int or parts[0] not in PROTOCOL_VERSIONS:
        raise RemoteProtocolError(f"version is {_shown(parts[0])}; spoken here: {', '.join(map(str, PROTOCOL_VERSIONS))}")
    codec = _CODECS.get(parts[1]) if type(parts[1]) is int else None
    if codec is None:
        raise RemoteProtocolError(f"tag is {_shown(parts[1])}; it must be one of {', '.join(map(str, _CODECS))}")
    return codec.unpack(parts)


def _unpacked(payload: bytes) -> Any:
    """Unpack the bytes. Lists are at most as long as their field allows, and only the last field of a message may be long.

    An unpacker allocates room for a list's claimed length before it sees the items, and again for each list in a list. With one
    limit for all lists, 3 KB of claims took 8 MB.
    """
    try:
        return msgpack.unpackb(payload, max_array_len=_SHORT_ARRAY, **_LIMITS)
    except ValueError as error:
        if "max_array_len" not in str(error):
            raise
    unpacker = msgpack.Unpacker(read_size=len(payload), max_buffer_size=len(payload), max_array_len=_SHORT_ARRAY, **_LIMITS)
    unpacker.feed(payload)
    num_parts = _array_length(unpacker, _SHORT_ARRAY)
    parts = [unpacker.unpack() for _ in range(num_parts - 1)]
    num_items = _array_length(unpacker, MAX_CHUNKS_PER_MESSAGE)
    parts.append(tuple([unpacker.unpack() for _ in range(num_items)]))
    if unpacker.tell() != len(payload):
        raise ValueError("extra data behind the message")
    return tuple(parts)


def _array_length(unpacker: msgpack.Unpacker, most: int) -> int:
    length: int = unpacker.read_array_header()
    if length > most:
        raise ValueError(f"{length} exceeds the {most} entries that a list can have")
    return length


class _Codec:
    """The wire format of one message class."""

    def __init__(self, message_type: type[Message]) -> None:
        self._type = message_type
        self._tag = message_type.tag
        self._names = tuple(message_type.model_fields)
        self._values: Callable[[Any], tuple[Any, ...]] = operator.attrgetter(*self._names)
        self._validate = message_type.__pydantic_validator__.validate_python
        self._nested_at = -1
        for name, nested in (("chunks", ChunkSize), ("grants", IssuedGrant)):
            if name in self._names:
                self._nested_at = self._names.index(name)
                self._nested_names = tuple(nested.model_fields)
                self._nested_values: Callable[[Any], tuple[Any, ...]] = operator.attrgetter(*self._nested_names)

    def pack(self, message: Message) -> bytes:
        values = self._values(message)
        if self._nested_at >= 0:
            at = self._nested_at
            values = (*values[:at], tuple(map(self._nested_values, values[at])), *values[at + 1 :])
        packed: bytes = msgpack.packb((PROTOCOL_VERSION, self._tag, *values))
        return packed

    def unpack(self, parts: tuple[Any, ...]) -> Message:
        if len(parts) != len(self._names) + 2:
            raise RemoteProtocolError(
                f"{self._type.__name__} has {len(parts) - 2} fields; it must have {len(self._names)}: {', '.join(self._names)}"
            )
        fields = dict(zip(self._names, parts[2:], strict=True))
        if self._nested_at >= 0:
            name = self._names[self._nested_at]
            fields[name] = self._named(name, fields[name])
        try:
            message: Message = self._validate(fields)
        except ValidationError as error:
            first = error.errors(include_url=False, include_context=False, include_input=True)[0]
            path = ".".join(map(str, first["loc"])) or "whole message"
            raise RemoteProtocolError(f"{self._type.__name__}.{path} is {_shown(first['input'])}: {first['msg']}") from None
        return message

    def _named(self, field: str, items: Any) -> tuple[dict[str, Any], ...]:
        names = self._nested_names
        if type(items) is not tuple:
            raise RemoteProtocolError(f"{self._type.__name__}.{field} is {_shape(items)}; it must be an array of arrays")
        for index, item in enumerate(items):
            if type(item) is not tuple or len(item) != len(names):
                raise RemoteProtocolError(
                    f"{self._type.__name__}.{field}.{index} is {_shape(item)}; it must be an array of {', '.join(names)}"
                )
        return tuple([dict(zip(names, item, strict=True)) for item in items])


_NUM_HEADER_PARTS: Final = 3
_CODECS: Final = {message_type.tag: _Codec(message_type) for message_type in MESSAGE_TYPES}


def _brief(error: BaseException) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__


def _shape(value: Any) -> str:
    """Describe a hostile value without its contents."""
    return f"an array of {len(value)}" if isinstance(value, tuple) else f"of type {type(value).__name__}"


def _shown(value: Any) -> str:
    """Return a hostile value, short enough for a log line."""
    if isinstance(value, tuple | dict):
        return _shape(value)
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
