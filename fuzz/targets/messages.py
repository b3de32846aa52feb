"""Control messages between ranks: what a peer, or a stranger who knows a session's id, puts on the ZeroMQ socket."""

from __future__ import annotations

from typing import Any

import msgpack

from fuzz.target import Target, require
from fuzz.trees import tree_mutator
from transfer.errors import RemoteProtocolError
from transfer.messages import (
    AbortTransfer,
    ChunkReady,
    ChunkRejected,
    ChunkSize,
    GrantRefused,
    GrantRequest,
    GrantsIssued,
    IssuedGrant,
    Message,
    WriterDrained,
    decode,
    encode,
)

MESSAGES: tuple[Message, ...] = (
    GrantRequest(
        incarnation=2**63 + 1,
        request_id="r-1",
        route=2,
        chunks=tuple(ChunkSize(chunk=chunk, num_bytes=4096 * (chunk + 1)) for chunk in range(3)),
    ),
    GrantRequest(
        incarnation=1, request_id="r", route=0, chunks=tuple(ChunkSize(chunk=chunk, num_bytes=256) for chunk in range(40))
    ),
    ChunkReady(incarnation=7, request_id="r-1", route=0, chunk=5, begin=65536, num_bytes=4096, digest=2**64 - 1, attempt=1),
    WriterDrained(incarnation=7, request_id="é", route=1),
    GrantsIssued(incarnation=7, request_id="r-1", route=2, grants=(IssuedGrant(chunk=0, begin=256, end=4352),)),
    GrantRefused(incarnation=7, request_id="r-1", route=2, reason="no"),
    ChunkRejected(incarnation=7, request_id="r-1", route=2, chunk=3, begin=512, attempt=0, reason="digest"),
    AbortTransfer(incarnation=7, request_id="r-1", route=2, reason=""),
)


def check(data: bytes) -> None:
    message = decode(data)
    again = encode(message)
    # Whatever was accepted says exactly what was on the wire: nothing was coerced, defaulted or dropped.
    require(_typed(_tree(again)) == _typed(_tree(data)), f"{message!r} was read as something else than was written")
    require(decode(again) == message, f"{message!r} does not survive the wire")
    type(message)(**dict(message))  # as its class would have it: no field is out of its range


def _tree(data: bytes) -> Any:
    return msgpack.unpackb(data, strict_map_key=False)


def _typed(tree: Any) -> Any:
    """With the type of every value, for 1, 1.0 and True are equal."""
    return [_typed(item) for item in tree] if isinstance(tree, list) else (type(tree), tree)


TARGET = Target(
    name="messages",
    about="control messages (msgpack)",
    modules=("transfer.messages",),
    check=check,
    refuses=(RemoteProtocolError,),
    mutate=tree_mutator(_tree, msgpack.packb),
    seeds=lambda: [encode(message) for message in MESSAGES],
    max_line_chars=700,
)
