"""Ask decode leaders for room with `Reserve`, for decode sides without the capability `room_in_stream`.

Release 0.3 removes it (docs/adr/0045-room-in-the-stream.md).
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, cast

import grpc

from transfer.chunk import ChunkPlan
from transfer.connector.decode_instances import Join, Reservation
from transfer.pb import kvferry_pb2 as pb
from transfer.pb import kvferry_pb2_grpc as pb_grpc
from transfer.registry.convert import chunk_plan_to_proto
from transfer.registry.peer_channel import PeerChannel
from transfer.registry.security import Security
from transfer.registry.status import readable, tier_error_of

if TYPE_CHECKING:
    from transfer.pb.kvferry_pb2_grpc import DecodeControlAsyncStub

RESERVE_TIMEOUT_S = 5.0


class ReserveClient:
    """Call `DecodeControl.Reserve`, over one channel for each decode leader.

    Args:
        security: TLS or plain text of these calls.
    """

    def __init__(self, security: Security) -> None:
        self._security = security
        self._channels: dict[str, PeerChannel] = {}
        self._closing: set[asyncio.Task[None]] = set()

    @property
    def addresses(self) -> tuple[str, ...]:
        """Addresses of the decode leaders to which a channel is open."""
        return tuple(self._channels)

    async def reserve(self, join: Join, request_id: str, plan: ChunkPlan, *, prefill_incarnation: int) -> Reservation:
        """Ask the decode leader for room for a request that is divided by `plan`.

        Raises:
            TransferError: It cannot be asked, or its answer fails the request.
        """
        if join.address not in self._channels:
            self._channels[join.address] = PeerChannel(join.address, self._security)
        channel = await self._channels[join.address].ready(timeout_s=RESERVE_TIMEOUT_S)
        stub = cast("DecodeControlAsyncStub", pb_grpc.DecodeControlStub(channel))
        question = pb.ReserveRequest(
            request_id=request_id,
            prefill_incarnation=prefill_incarnation,
            decode_incarnation=join.incarnation,
            chunk_plan=chunk_plan_to_proto(plan),
        )
        try:
            answer = await stub.Reserve(question, timeout=RESERVE_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            raise tier_error_of(error, peer=join.address) from error
        found = readable(answer, peer=join.address, method="Reserve")
        start_token = found.start_token if found.HasField("start_token") else None
        return Reservation(is_reserved=bool(found.reserved), start_token=start_token)

    def forget_address(self, address: str) -> None:
        """Close the channel to a decode leader; calls in flight end."""
        channel = self._channels.pop(address, None)
        if channel is not None:
            closing = asyncio.ensure_future(channel.close())
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)

    async def close(self) -> None:
        """Close every channel. A later `reserve` opens a new one."""
        for address in list(self._channels):
            self.forget_address(address)
        await asyncio.gather(*self._closing, return_exceptions=True)
