"""Send messages between a leader and its rank processes, over a socket file in a folder that only this user can enter.

The ranks of an engine that spans hosts use a channel with keys over TCP instead; see `node_runtime.rank_port_service`.

Both ends are of one build, so the messages are frozen dataclasses, named by their class and checked on arrival.

Some engines run the leader and a rank in one process, for example vLLM with TP 1. After `LeaderLink.bypass_socket`, both ends
pass message objects directly, without the socket. This reduced the CPU time of the prefill side's loop thread from 7.2 to 6.2 ms
for a prompt of 2,000 tokens. The engine's thread waits for the interpreter (GIL) during that time.
"""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgpack
from pydantic import TypeAdapter, ValidationError

from transfer.control.base import ControlClient, ControlServer, Received
from transfer.control.unix_channel import SCHEME, UnixControlClient, UnixControlServer, private_folder
from transfer.errors import LocalProtocolError, TransferError
from transfer.loop_turns import turns_of

MAX_PAYLOAD_BYTES = 64 << 20
"""Largest message. The largest ones have page tables: 5 MB for each layer group of a prompt of a million one-token pages."""

_NAME_CHARS = 16  # characters of a digest: the path of a socket has 107 characters at most


class RankCodec:
    """Encode and decode messages.

    Args:
        types: Classes of the messages, each with its own name.
    """

    def __init__(self, *types: type) -> None:
        self._adapters: dict[str, TypeAdapter[Any]] = {message_type.__name__: TypeAdapter(message_type) for message_type in types}

    def encode(self, message: object) -> bytes:
        name = type(message).__name__
        if name not in self._adapters:
            raise LocalProtocolError(f"{name} is not a message of this link")
        packed: bytes = msgpack.packb((name, message), default=_fields)
        return packed

    def decode(self, payload: bytes) -> Any:
        """Return the message.

        Raises:
            LocalProtocolError: `encode` does not make such bytes.
        """
        try:
            name, fields = msgpack.unpackb(payload, strict_map_key=False)
            adapter = self._adapters.get(name)
        except (ValueError, TypeError, msgpack.UnpackException) as error:
            raise LocalProtocolError(f"{len(payload)} bytes are not a message of a rank link: {type(error).__name__}") from error
        if adapter is None:
            raise LocalProtocolError(f"message {name!r:.200} of a rank link does not fit: there is none of that name")
        try:
            return adapter.validate_python(fields)
        except (ValidationError, TypeError, TransferError) as error:  # the last one is raised by the classes
            raise LocalProtocolError(f"message {name} of a rank link does not fit its class: {error}") from error


def _fields(value: object) -> Any:
    if dataclasses.is_dataclass(value):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if isinstance(value, set | frozenset):
        return list(value)
    raise TypeError(f"{type(value).__name__} cannot travel to a rank")


@dataclass(frozen=True, slots=True, kw_only=True)
class RankAddress:
    """Where a rank process finds its leader.

    Args:
        endpoint: Address of the leader's socket, ``unix://PATH`` or ``tcp://HOST:PORT``.
        token: Session id of the rank on this socket; known to leader and rank only.
    """

    endpoint: str
    token: int

    @property
    def path(self) -> Path:
        """Path of the socket file."""
        return Path(self.endpoint.removeprefix(SCHEME))


def new_addresses(folder: Path, num_ranks: int) -> list[RankAddress]:
    """Return addresses for ranks that the leader starts, with a new socket in a private folder."""
    endpoint = f"{SCHEME}{folder / secrets.token_hex(4)}"
    return [RankAddress(endpoint=endpoint, token=_new_token()) for _ in range(num_ranks)]


def _new_token() -> int:
    return secrets.randbits(62) + 1


def rank_socket_address(instance: str, rank: int) -> RankAddress:
    """Return the address at which a rank of an engine meets its leader; both derive it from the instance.

    The engine starts its processes itself, in any order, so neither end can hand the other an address.

    Args:
        instance: A name that only this instance of the engine has, such as the id that vLLM gives it.

    Raises:
        ConfigError: There is no folder that only this user can enter.
    """
    name = hashlib.sha256(instance.encode()).hexdigest()[:_NAME_CHARS]
    return RankAddress(endpoint=f"{SCHEME}{private_folder() / name}", token=rank + 1)


class Inbox:
    """The messages of one end, in the order of their arrival."""

    def __init__(self, loop: asyncio.AbstractEventLoop, on_message: Callable[..., None]) -> None:
        self.loop = loop
        self._on_message = on_message
        self._turns = turns_of(loop)
        self._is_closed = False

    def put(self, message: object, *sender: int) -> bool:
        """Queue a message of the other end, which is on the same loop. Return False if this end is closed."""
        if not self._is_closed:
            self.loop.call_soon(self._take, message, *sender)
        return not self._is_closed

    def _take(self, message: object, *sender: int) -> None:
        if not self._is_closed:
            self.take(message, *sender, begun_s=time.monotonic())

    def take(self, message: object, *sender: int, begun_s: float) -> None:
        """Handle a message, on which this turn of the loop has spent the time since `begun_s`."""
        self._on_message(*sender, message)
        self._turns.took(message, begun_s)

    def close(self) -> None:
        self._is_closed = True


class LeaderLink:
    """The leader's end: one socket for all ranks of one life of the group.

    Args:
        addresses: Address of each rank, with one endpoint in common.
        codec: Messages of both directions.
        server: Carries the messages of ranks that `admit` has admitted, and loses none. None means the socket file of the
            addresses, to which every process of this user is admitted.
    """

    def __init__(self, addresses: Sequence[RankAddress], codec: RankCodec, *, server: ControlServer | None = None) -> None:
        self.addresses = list(addresses)
        self._codec = codec
        self._tokens = [address.token for address in addresses]
        self._ranks = {token: rank for rank, token in enumerate(self._tokens)}
        if server is None:
            server = UnixControlServer(addresses[0].endpoint, max_payload_bytes=MAX_PAYLOAD_BYTES)
            for token in self._tokens:
                server.allow(token)
        self._server = server
        self._local_ranks: dict[int, RankLink] = {}  # ends of ranks in this process
        self.inbox: Inbox | None = None

    def watch(self, loop: asyncio.AbstractEventLoop, on_message: Callable[[int, Any], None]) -> None:
        """Call `on_message` on `loop` with the rank and each message."""
        inbox = self.inbox = Inbox(loop, on_message)

        def on_received(received: Received) -> None:
            begun_s = time.monotonic()
            inbox.take(self._codec.decode(received.payload), self._ranks[received.peer], begun_s=begun_s)

        self._server.watch(loop, on_received)

    def admit(self, rank: int, key: bytes) -> RankAddress:
        """Return a new address for the process of a rank that has the key. An earlier address of the rank is over."""
        self._server.forget(self._tokens[rank])
        del self._ranks[self._tokens[rank]]
        self.addresses[rank] = RankAddress(endpoint=self._server.address, token=_new_token())
        token = self._tokens[rank] = self.addresses[rank].token
        self._ranks[token] = rank
        self._server.allow(token, key)
        return self.addresses[rank]

    def bypass_socket(self, rank: int) -> None:
        """Pass messages of both directions without the socket from now on, if the rank's end is watched by the same loop.

        Call it when the rank has received all that was sent to it, and while its latest message is handled: what it sent after
        that one through the socket can arrive late.
        """
        local = _rank_links_in_process.get(self.addresses[rank])
        if local is not None and local.inbox is not None and self.inbox is not None and local.inbox.loop is self.inbox.loop:
            self._local_ranks[rank] = local
            local.use_local(self.inbox, rank)

    def send(self, rank: int, message: object) -> bool:
        """Send; return False if the rank is gone or has not taken its messages for long. The group cannot continue then."""
        if rank in self._local_ranks:
            return self._local_ranks[rank].deliver_local(message)
        return self._server.send(self._tokens[rank], self._codec.encode(message))

    def broadcast(self, message: object) -> bool:
        """Send to all ranks, which receive all messages in the same order; return False as `send` does."""
        taken = [local.deliver_local(message) for local in self._local_ranks.values()]
        if len(taken) < len(self._tokens):
            payload = self._codec.encode(message)
            taken += [
                self._server.send(token, payload) for rank, token in enumerate(self._tokens) if rank not in self._local_ranks
            ]
        return all(taken)

    def close(self) -> None:
        if self.inbox is not None:
            self.inbox.close()
        self._server.close()


class RankLink:
    """A rank's end.

    Args:
        client: Carries the messages. None means the socket file of the address.
    """

    def __init__(self, address: RankAddress, codec: RankCodec, *, client: ControlClient | None = None) -> None:
        self._address = address
        self._codec = codec
        if client is None:
            client = UnixControlClient(address.endpoint, session_id=address.token, max_payload_bytes=MAX_PAYLOAD_BYTES)
        self._client = client
        self._local_leader: tuple[Inbox, int] | None = None  # its inbox, and the number of this rank
        self.inbox: Inbox | None = None

    def watch(self, loop: asyncio.AbstractEventLoop, on_message: Callable[[Any], None]) -> None:
        inbox = self.inbox = Inbox(loop, on_message)
        _rank_links_in_process[self._address] = self

        def on_payload(payload: bytes) -> None:
            begun_s = time.monotonic()
            inbox.take(self._codec.decode(payload), begun_s=begun_s)

        self._client.watch(loop, on_payload)

    def use_local(self, leader: Inbox, rank: int) -> None:
        """Send directly to a leader in this process from now on, as the rank of that number."""
        self._local_leader = leader, rank

    def deliver_local(self, message: object) -> bool:
        """Queue a message of a leader in this process. Return False if this end is closed."""
        assert self.inbox is not None, "a leader knows only ends that are watched"
        return self.inbox.put(message)

    def send(self, message: object) -> None:
        """Send; raise LocalProtocolError if the queue is full, because the leader has not taken messages for long."""
        if self._local_leader is not None:
            inbox, rank = self._local_leader
            inbox.put(message, rank)
        elif not self._client.send(self._codec.encode(message)):
            raise LocalProtocolError("the leader does not take this rank's messages")

    def close(self) -> None:
        if _rank_links_in_process.get(self._address) is self:
            del _rank_links_in_process[self._address]
        if self.inbox is not None:
            self.inbox.close()
        self._client.close()


_rank_links_in_process: dict[RankAddress, RankLink] = {}
"""Open ends of ranks in this process."""
