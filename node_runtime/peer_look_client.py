"""Ask the nodes of the other tier for their status, while a viewer has this node's status page open."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Final, cast

import grpc

from node_runtime.cluster_view import Seen
from transfer.errors import RemoteProtocolError, TransferError
from transfer.messages import clip_reason
from transfer.pb import kvferry_pb2 as pb
from transfer.pb import kvferry_pb2_grpc as pb_grpc
from transfer.registry.peer_channel import PeerChannel
from transfer.registry.security import Security
from transfer.registry.status import error_of, readable

if TYPE_CHECKING:
    from transfer.pb.kvferry_pb2_grpc import NodeControlAsyncStub

LOOK_S: Final = 1.0
"""Shortest time between two questions to a peer, however many people look."""
ANSWER_S: Final = 2.0
FIRST_WAIT_S: Final = 1.0
"""Wait of the first look for the answers of peers. Later looks return the last answers at once."""
IDLE_S: Final = 15.0
"""Connections are closed after this time without a look."""
MAX_ASKED: Final = 32
MAX_STATUS_BYTES: Final = 256 << 10
"""Largest status that is shown. The status of 32 ranks with 32 links each has a tenth of this size."""
MAX_STATUS_PARTS: Final = 8192
"""Maximum number of ranks, pools, links and so on of a status. Each may have two bytes on the wire, and hundreds in JSON."""


class PeerLook:
    """The status of peers. Owned by the leader's loop.

    Args:
        security: TLS or plain text of calls to peers. With TLS, they accept a node that is one of their peers.
    """

    def __init__(self, security: Security) -> None:
        self._security = security
        self._channels: dict[str, PeerChannel] = {}
        self._seen: dict[str, Seen] = {}
        self._asked_s = -LOOK_S
        self._asking: asyncio.Task[None] | None = None
        self._ending: asyncio.Task[None] | None = None
        self._looked_s = 0.0

    async def look(self, addresses: Sequence[str]) -> Mapping[str, Seen]:
        """Return the newest answers of peers, within `FIRST_WAIT_S`, and ask again if they are old.

        Args:
            addresses: Joined peers. Only the first `MAX_ASKED` are asked.
        """
        now_s = self._looked_s = time.monotonic()
        asked = list(addresses)[:MAX_ASKED]
        if (self._asking is None or self._asking.done()) and now_s - self._asked_s >= LOOK_S:
            self._asked_s = now_s
            self._asking = asyncio.ensure_future(self._ask_all(asked))
        if self._ending is None or self._ending.done():
            self._ending = asyncio.ensure_future(self._end_when_idle())
        if self._asking is not None and any(address not in self._seen for address in asked):
            await asyncio.wait({self._asking}, timeout=FIRST_WAIT_S)
        return {address: self._seen[address] for address in asked if address in self._seen}

    @property
    def num_connections(self) -> int:
        """Number of peers to which a connection is kept."""
        return len(self._channels)

    async def close(self) -> None:
        tasks = [task for task in (self._asking, self._ending) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._keep([])

    async def _ask_all(self, addresses: Sequence[str]) -> None:
        await self._keep(addresses)
        for seen in await asyncio.gather(*(self._ask(address) for address in addresses)):
            self._seen[seen.address] = seen

    async def _ask(self, address: str) -> Seen:
        try:
            if address not in self._channels:
                self._channels[address] = PeerChannel(address, self._security)
            channel = await self._channels[address].ready(timeout_s=ANSWER_S)
            stub = cast("NodeControlAsyncStub", pb_grpc.NodeControlStub(channel))
            try:
                answer = readable(await stub.Status(pb.StatusRequest(), timeout=ANSWER_S), method="Status", peer=address)
            except grpc.aio.AioRpcError as error:
                if error.code() is grpc.StatusCode.UNIMPLEMENTED:  # an older version
                    raise RemoteProtocolError(f"{address}: it does not serve NodeControl") from error
                raise error_of(error, peer=address) from error
            num_bytes, num_parts = answer.ByteSize(), _num_parts(answer)
            if num_bytes > MAX_STATUS_BYTES or num_parts > MAX_STATUS_PARTS:
                raise RemoteProtocolError(
                    f"{address}: its status has {num_bytes:,} bytes and {num_parts:,} parts; up to {MAX_STATUS_BYTES:,} and "
                    f"{MAX_STATUS_PARTS:,} are shown"
                )
        except TransferError as error:
            return Seen(address=address, error=clip_reason(str(error)), at_s=time.monotonic())
        return Seen(address=address, status=answer, at_s=time.monotonic())

    async def _keep(self, addresses: Sequence[str]) -> None:
        """Close the connections to all other peers, and forget their answers."""
        gone = [self._channels.pop(address) for address in list(self._channels) if address not in addresses]
        self._seen = {address: seen for address, seen in self._seen.items() if address in addresses}
        await asyncio.gather(*(channel.close() for channel in gone))

    async def _end_when_idle(self) -> None:
        while (left_s := self._looked_s + IDLE_S - time.monotonic()) > 0:
            await asyncio.sleep(left_s)
        await self._keep([])


def _num_parts(status: pb.NodeStatus) -> int:
    of_ranks = sum(len(rank.pools) + len(rank.link_uses) for rank in status.ranks)
    own = len(status.ranks) + of_ranks + len(status.links) + len(status.peers) + len(status.memory_plan.lines)
    return own + (_num_parts(status.other_side) if status.HasField("other_side") else 0)
