"""`JoinService` and `DecodeInstances` without the other parts of a prefill node, and one rank that attaches at once."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from typing import Any

from tests.runtime.instances import instance
from transfer.chunk import ChunkPlan
from transfer.connector.decode_instances import DecodeInstances
from transfer.connector.join_service import JoinService
from transfer.connector.messages import AttachDecode, DecodeAttached
from transfer.connector.side_service import Draining
from transfer.pb import kvferry_pb2 as pb
from transfer.pb import kvferry_pb2_grpc as pb_grpc
from transfer.registry.security import PlainText, Security
from transfer.sizes import Cut

CUT = Cut(plan=ChunkPlan(chunk_tokens=4), largest_piece_bytes=64)


class JoinServer(pb_grpc.PrefillControlServicer):
    """Serves `Join`.

    Attributes:
        attach_s: Seconds until the rank is attached.
        others_tokens: What each heartbeat tells of other decode instances.
        is_idle: Whether nothing of a join is in flight.
        num_joins: Number of joins that the leader announced to the rank.
        lost: Why joins ended.
    """

    def __init__(self, incarnation: int, *, capabilities: frozenset[str] = frozenset(), security: Security | None = None) -> None:
        self.instance = instance(incarnation, capabilities=capabilities)
        self.attach_s = 0.0
        self.others_tokens = 0
        self.is_idle = True
        self.num_joins = 0
        self.lost: list[str] = []
        self.draining = Draining()
        self.joins = DecodeInstances(1, self._rank, lambda join, error: self.lost.append(str(error)), lambda join: CUT)
        self._service = JoinService(security=security or PlainText(), draining=self.draining)

    def _rank(self, message: object) -> None:
        if isinstance(message, AttachDecode):
            self.num_joins += 1
            attached = DecodeAttached(join=message.join, incarnation=message.instance.incarnation, links=())
            asyncio.get_running_loop().call_later(self.attach_s, self.joins.on_attached, 0, attached)

    async def Join(self, request: pb.JoinRequest, context: Any) -> AsyncGenerator[pb.JoinEvent, None]:
        serving = self._service.events(
            request,
            context,
            own=self.instance,
            joins=self.joins,
            is_idle=lambda join: self.is_idle,
            others_tokens=lambda join: self.others_tokens,
        )
        async with contextlib.aclosing(serving) as events:
            async for event in events:
                yield event
