"""What a prefill node says in the call by which it is joined, and how long it may be silent."""

from __future__ import annotations

import asyncio
from typing import Any, Final

import grpc

from transfer.errors import PeerUnreachable
from transfer.pb import kvferry_pb2 as pb
from transfer.registry.heartbeats import HeartbeatWatch

JOIN_TIMEOUT_S: Final = 60.0
"""Until the first event: every rank attaches and probes its links before."""

JoinCall = grpc.aio.UnaryStreamCall[Any, pb.JoinEvent]


async def first_event(call: JoinCall, address: str) -> pb.JoinEvent:
    """What the node says to a join; it attaches every rank and probes their links first.

    Raises:
        PeerUnreachable: It has said nothing for too long, or ended the call.
    """
    try:
        async with asyncio.timeout(JOIN_TIMEOUT_S):
            return _event_of(await call.read(), address)
    except TimeoutError:
        raise PeerUnreachable(f"{address} is silent: nothing for {JOIN_TIMEOUT_S:g} s") from None


async def next_event(call: JoinCall, address: str, *, heartbeats: HeartbeatWatch, broken: asyncio.Future[str]) -> pb.JoinEvent:
    """What a joined node says next. Ticks, not seconds, tell a silent one: this loop may have been busy meanwhile.

    Args:
        heartbeats: Counts ticks since it said something.
        broken: Set to why, where the join is over for another reason.

    Raises:
        PeerUnreachable: It is silent, has ended the call, or `broken` is set.
    """
    reading = asyncio.ensure_future(call.read())
    waiting: set[asyncio.Future[Any]] = {reading, broken}
    try:
        while not (await asyncio.wait(waiting, timeout=heartbeats.tick_s, return_when=asyncio.FIRST_COMPLETED))[0]:
            if heartbeats.tick():
                raise PeerUnreachable(f"{address} is silent: {heartbeats.describe()}")
        if broken.done():
            raise PeerUnreachable(f"{address}: {broken.result()}")
        return _event_of(reading.result(), address)
    finally:
        reading.cancel()


def _event_of(read: object, address: str) -> pb.JoinEvent:
    if not isinstance(read, pb.JoinEvent):  # grpc.aio.EOF
        raise PeerUnreachable(f"{address} ended the join")
    return read
