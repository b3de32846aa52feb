"""Prefill nodes that are called without gRPC: their servicers run on the caller's loop, in real or virtual time."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from types import SimpleNamespace
from typing import Any, NoReturn

import grpc
import pytest

from tests.runtime.instances import instance, until
from transfer.breaker import BreakerSettings
from transfer.connector.prefill_nodes import PrefillNodes
from transfer.connector.prefill_peer import PrefillPeer
from transfer.errors import PeerUnreachable
from transfer.pb import kvferry_pb2 as pb


class LocalContext:
    """A call's context. An abort reaches the caller as an error of gRPC."""

    async def abort(
        self, code: grpc.StatusCode, details: str = "", trailing_metadata: Sequence[tuple[str, Any]] = ()
    ) -> NoReturn:
        raise grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(*trailing_metadata), details)

    def invocation_metadata(self) -> tuple[()]:
        return ()


class LocalCall:
    """A call whose events a servicer yields. `cancel` ends the servicer's method as the end of a connection does."""

    def __init__(self, events: AsyncGenerator[Any, None]) -> None:
        self._events: asyncio.Queue[Any] = asyncio.Queue()
        self._serving = asyncio.ensure_future(self._serve(events))

    async def _serve(self, events: AsyncGenerator[Any, None]) -> None:
        try:
            async with aclosing(events):
                async for event in events:
                    self._events.put_nowait(event)
            self._events.put_nowait(grpc.aio.EOF)
        except grpc.aio.AioRpcError as error:
            self._events.put_nowait(error)

    async def read(self) -> Any:
        event = await self._events.get()
        if isinstance(event, grpc.aio.AioRpcError):
            raise event
        return event

    async def __aiter__(self) -> AsyncGenerator[Any, None]:
        while (event := await self.read()) is not grpc.aio.EOF:
            yield event

    def cancel(self) -> None:
        self._serving.cancel()


def serve_locally(monkeypatch: pytest.MonkeyPatch, nodes: Mapping[str, Any]) -> None:
    """Have the nodes, by address, answer every `Join` and `Prefill`; at other addresses nobody answers."""

    async def stub(peer: PrefillPeer) -> Any:
        if peer.address not in nodes:
            raise PeerUnreachable(f"{peer.address}: nobody listens there")

        def join(question: pb.JoinRequest) -> LocalCall:
            return LocalCall(nodes[peer.address].Join(question, LocalContext()))

        def prefill(question: pb.PrefillRequest, *, metadata: object) -> LocalCall:
            return LocalCall(nodes[peer.address].Prefill(question, LocalContext()))

        return SimpleNamespace(Join=join, Prefill=prefill)

    monkeypatch.setattr(PrefillPeer, "stub", stub)


BEAT_S = 0.1
BREAKER = BreakerSettings(failures=3, window_s=10.0, pause_s=1.0, max_pause_s=8.0)


class Tier:
    """The decode side's view of prefill nodes. Breakers and grace read the running loop's clock.

    Attributes:
        lost: (address, incarnation, reason) of each loss.
        changes: The address that could be picked at each change; empty where none could.
    """

    def __init__(self, addresses: Sequence[str], **settings: Any) -> None:
        self.lost: list[tuple[str, int, str]] = []
        self.changes: list[str] = []
        self.num_openings = self.num_faults = 0
        values: dict[str, Any] = {
            "own": instance(7),
            "decode_address": "127.0.0.1:1",
            "rank_addresses": ("127.0.0.1:2",),
            "heartbeat_s": BEAT_S,
            "ring_capacity_bytes": 1 << 20,
            "breaker": BREAKER,
            "on_lost": lambda peer, incarnation, reason: self.lost.append((peer.address, incarnation, reason)),
            "on_breaker_opened": self._count_opening,
            "on_fault": self._count_fault,
            "on_change": self._note_change,
            "clock": asyncio.get_running_loop().time,
        }
        self.peers = PrefillNodes(list(addresses), **(values | settings))

    def _count_opening(self) -> None:
        self.num_openings += 1

    def _count_fault(self) -> None:
        self.num_faults += 1

    def _note_change(self) -> None:
        peer = self.peers.pick()
        self.changes.append("" if peer is None else peer.address)

    def peer(self, address: str) -> PrefillPeer:
        (peer,) = [peer for peer in self.peers.peers if peer.address == address]
        return peer

    def states(self) -> dict[str, str]:
        return {peer.address: peer.state for peer in self.peers.peers}

    async def until(self, **states: int) -> None:
        """Wait until so many peers are in each of these states, and no others are there."""
        await until(lambda: Counter(self.states().values()) == Counter(states))


@asynccontextmanager
async def tier(*addresses: str, **settings: Any) -> AsyncIterator[Tier]:
    one = Tier(addresses, **settings)
    one.peers.start()
    try:
        yield one
    finally:
        await one.peers.close()
