"""`DecodeInstances` without the other parts of a prefill node, and one rank that attaches at once."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from typing import Any

from tests.runtime.instances import instance
from transfer.chunk import ChunkPlan
from transfer.connector.decode_instances import DecodeInstances, Join
from transfer.connector.messages import AttachDecode, DecodeAttached
from transfer.connector.side_service import Draining
from transfer.pb import kvferry_pb2 as pb
from transfer.pb import kvferry_pb2_grpc as pb_grpc
from transfer.registry.security import PlainText, Security
from transfer.sizes import Cut

CUT = Cut(plan=ChunkPlan(chunk_tokens=4), largest_piece_bytes=64)


class Traffic:
    """The transfers to decode instances."""

    def __init__(self) -> None:
        self.idle = True
        self.tokens = 0

    def is_idle(self, join: Join) -> bool:
        return self.idle

    def others_tokens(self, join: Join) -> int:
        return self.tokens


class JoinServer(pb_grpc.PrefillControlServicer):
    """Serves `Join`.

    Attributes:
        attach_s: Seconds until the rank is attached.
        num_joins: Number of joins that the leader announced to the rank.
        traffic: What is in flight.
        lost: Why joins ended.
    """

    def __init__(
        self,
        incarnation: int,
        *,
        num_ranks: int = 1,
        capabilities: frozenset[str] = frozenset(),
        security: Security | None = None,
    ) -> None:
        self.instance = instance(incarnation, capabilities=capabilities)
        self.attach_s = 0.0
        self.num_joins = 0
        self.traffic = Traffic()
        self.lost: list[str] = []
        self.draining = Draining()
        self.joins = DecodeInstances(
            own=self.instance,
            num_ranks=num_ranks,
            security=security or PlainText(),
            draining=self.draining,
            traffic=self.traffic,
            broadcast=self._broadcast,
            on_lost=lambda join, error: self.lost.append(str(error)),
            choose_cut=self._choose_cut,
        )

    def _choose_cut(self, join: Join) -> Cut:
        return CUT

    def _broadcast(self, message: object) -> None:
        if isinstance(message, AttachDecode):
            self.num_joins += 1
            attached = DecodeAttached(join=message.join, incarnation=message.instance.incarnation, links=())
            asyncio.get_running_loop().call_later(self.attach_s, self.joins.on_attached, 0, attached)

    async def Join(self, request: pb.JoinRequest, context: Any) -> AsyncGenerator[pb.JoinEvent, None]:
        async with contextlib.aclosing(self.joins.serve(request, context)) as events:
            async for event in events:
                yield event
