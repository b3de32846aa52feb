"""Attach a prefill rank to decode instances at the leader's request, and report the results."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from transfer.chunk import ChunkPlan
from transfer.connector.messages import AttachDecode, DecodeAttached, DecodeLost, DetachDecode
from transfer.errors import TransferError
from transfer.rank_context import RankContext
from transfer.send.attach import DecodeSessions
from transfer.send.loop import SenderLoop


class OutgoingSessions(DecodeSessions):
    """Open and close `DecodeSessions` at the leader's request.

    Args:
        context: The rank.
        sender: Takes the sessions over.
        plan: The finest way in which requests are divided.
        send: Called with each message to the leader.
    """

    def __init__(self, *, context: RankContext, sender: SenderLoop, plan: ChunkPlan, send: Callable[[object], None]) -> None:
        super().__init__(context=context, sender=sender, plan=plan, on_lost=self._say_lost)
        self._send = send
        self._attaching: set[asyncio.Task[None]] = set()

    def on_message(self, message: Any) -> bool:
        """Handle a message of the leader. Return False if it is not about sessions."""
        match message:
            case AttachDecode():
                attaching = self._context.loop.create_task(self._attach_to(message))
                self._attaching.add(attaching)
                attaching.add_done_callback(self._on_attach_over)
            case DetachDecode():
                self.close(message.incarnation, message.reason)
            case _:
                return False
        return True

    async def close_all(self, reason: str) -> None:
        for attaching in list(self._attaching):
            attaching.cancel()
        await super().close_all(reason)

    async def _attach_to(self, message: AttachDecode) -> None:
        incarnation = message.instance.incarnation
        try:
            links = await self.open(message.instance, message.rank_addresses, join=message.join)
        except TransferError as error:
            is_refused = not isinstance(error, self.PASSING)
            self._send(DecodeLost(join=message.join, incarnation=incarnation, reason=str(error), is_refused=is_refused))
            return
        peer = self.of(incarnation)
        ring_bytes = 0 if peer is None else peer.ring_bytes
        self._send(DecodeAttached(join=message.join, incarnation=incarnation, links=links, ring_bytes=ring_bytes))

    def _on_attach_over(self, attaching: asyncio.Task[None]) -> None:
        self._attaching.discard(attaching)
        if not attaching.cancelled() and (error := attaching.exception()) is not None:
            self._context.on_crash(error)  # the leader would wait for an answer that never comes

    def _say_lost(self, join: int, incarnation: int, reason: str) -> None:
        self._send(DecodeLost(join=join, incarnation=incarnation, reason=reason))
