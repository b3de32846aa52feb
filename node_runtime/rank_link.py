"""Messages between a node's leader and its rank processes, over a socket file in a folder that only this user can enter.

Both ends are of one build, so the messages are plain frozen dataclasses, named by their class and checked on arrival.
"""

from __future__ import annotations

import asyncio
import dataclasses
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgpack
from pydantic import TypeAdapter, ValidationError

from transfer.control.base import Received
from transfer.control.zmq_channel import ZmqControlClient, ZmqControlServer
from transfer.errors import LocalProtocolError, TransferError
from transfer.loop_turns import turns_of

MAX_PAYLOAD_BYTES = 64 << 20
"""Of a message. The largest are page tables: of a prompt of a million tokens on pages of one, 5 MB for each group of layers."""

SILENCE_MS = 10_000
"""A rank's death is seen at once, by its process; silence only tells a frozen one. On a machine with more ranks than cores a
rank can be silent for a second and be well, and to take it for lost costs the whole group its life."""


class RankCodec:
    """Dataclasses to bytes and back.

    Args:
        types: The messages' classes; names must differ.
    """

    def __init__(self, *types: type) -> None:
        self._adapters: dict[str, TypeAdapter[Any]] = {message_type.__name__: TypeAdapter(message_type) for message_type in types}

    def encode(self, message: object) -> bytes:
        name = type(message).__name__
        if name not in self._adapters:
            raise LocalProtocolError(f"{name} is no message of this link")
        packed: bytes = msgpack.packb((name, message), default=_fields)
        return packed

    def decode(self, payload: bytes) -> Any:
        """The message.

        Raises:
            LocalProtocolError: The bytes are none that `encode` makes.
        """
        try:
            name, fields = msgpack.unpackb(payload, strict_map_key=False)
            adapter = self._adapters.get(name)
        except (ValueError, TypeError, msgpack.UnpackException) as error:
            raise LocalProtocolError(f"{len(payload)} bytes are no message of a rank link: {type(error).__name__}") from error
        if adapter is None:
            raise LocalProtocolError(f"message {name!r:.200} of a rank link does not fit: there is none of that name")
        try:
            return adapter.validate_python(fields)
        except (ValidationError, TypeError, TransferError) as error:  # those of the classes themselves
            raise LocalProtocolError(f"message {name} of a rank link does not fit its class: {error}") from error


def _fields(value: object) -> Any:
    if dataclasses.is_dataclass(value):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if isinstance(value, set | frozenset):
        return list(value)
    raise TypeError(f"{type(value).__name__} cannot travel to a rank")


@dataclass(frozen=True, slots=True, kw_only=True)
class RankAddress:
    """What a rank process needs to find its leader.

    Args:
        endpoint: ``ipc://`` address of the leader's socket.
        token: Names the rank on it; secret between the two.
    """

    endpoint: str
    token: int


class LeaderLink:
    """The leader's end: one socket, all ranks of one life of the group.

    Args:
        folder: Private folder for the socket file.
        num_ranks: Ranks that may speak.
        codec: Messages of both directions.
    """

    def __init__(self, folder: Path, num_ranks: int, codec: RankCodec) -> None:
        endpoint = f"ipc://{folder / secrets.token_hex(4)}"
        self._open(endpoint, [secrets.randbits(62) + 1 for _ in range(num_ranks)], codec)

    @classmethod
    def at(cls, addresses: Sequence[RankAddress], codec: RankCodec) -> LeaderLink:
        """Where ranks look for it that nobody tells: the addresses of all ranks, with one endpoint in common."""
        link = cls.__new__(cls)
        link._open(addresses[0].endpoint, [address.token for address in addresses], codec)
        return link

    def _open(self, endpoint: str, tokens: list[int], codec: RankCodec) -> None:
        self._codec = codec
        self._tokens = tokens
        self._ranks = {token: rank for rank, token in enumerate(tokens)}
        self._server = ZmqControlServer(endpoint, max_payload_bytes=MAX_PAYLOAD_BYTES)
        for token in tokens:
            self._server.allow(token)

    def address_of(self, rank: int) -> RankAddress:
        return RankAddress(endpoint=self._server.address, token=self._tokens[rank])

    def watch(self, loop: asyncio.AbstractEventLoop, on_message: Callable[[int, Any], None]) -> None:
        """Hand over each (rank, message) on `loop`."""
        turns = turns_of(loop)

        def on_received(received: Received) -> None:
            begun_s = time.monotonic()
            message = self._codec.decode(received.payload)
            on_message(self._ranks[received.peer], message)
            turns.took(message, begun_s)

        self._server.watch(loop, on_received)

    def send(self, rank: int, message: object) -> bool:
        """False: the rank is gone, or has not taken its messages for long; the group is then of no more use."""
        return self._server.send(self._tokens[rank], self._codec.encode(message))

    def broadcast(self, message: object) -> bool:
        """To all ranks, in one order for all messages; False as for `send`."""
        payload = self._codec.encode(message)
        return all([self._server.send(token, payload) for token in self._tokens])

    def close(self) -> None:
        self._server.close()


class RankLink:
    """A rank's end."""

    def __init__(self, address: RankAddress, codec: RankCodec) -> None:
        self._codec = codec
        self._client = ZmqControlClient(
            address.endpoint, session_id=address.token, max_payload_bytes=MAX_PAYLOAD_BYTES, silence_ms=SILENCE_MS
        )

    def watch(self, loop: asyncio.AbstractEventLoop, on_message: Callable[[Any], None]) -> None:
        turns = turns_of(loop)

        def on_payload(payload: bytes) -> None:
            begun_s = time.monotonic()
            message = self._codec.decode(payload)
            on_message(message)
            turns.took(message, begun_s)

        self._client.watch(loop, on_payload)

    def send(self, message: object) -> None:
        """Raises LocalProtocolError when the leader has not taken messages for so long that the queue is full."""
        if not self._client.send(self._codec.encode(message)):
            raise LocalProtocolError("the leader does not take this rank's messages")

    def close(self) -> None:
        self._client.close()
