"""Prefill nodes that are called without gRPC: their servicers run on the caller's loop, in real or virtual time."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, NoReturn

import grpc
import pytest

from tests.runtime.instances import hello, until
from transfer.config import BreakerConfig, ConnectorConfig, HeartbeatConfig, TlsConfig, TransportConfig
from transfer.connector.prefill_nodes import PrefillNodes
from transfer.connector.prefill_peer import PrefillPeer
from transfer.errors import PeerUnreachable
from transfer.metrics import NodeMetrics
from transfer.pb import kvferry_pb2 as pb
from transfer.registry.discovery import DiscoveryView
from transfer.registry.security import PlainText


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
BREAKER = BreakerConfig(failures=3, window_s=10.0, pause_s=1.0, max_pause_s=8.0)


class Tier:
    """The decode side's view of prefill nodes. Breakers and grace read the running loop's clock.

    Attributes:
        lost: (address, incarnation, reason) of each loss.
        changes: The address that could be picked at each change; empty where none could.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        *,
        heartbeat_s: float = BEAT_S,
        ring_bytes: int = 1 << 20,
        min_bandwidth_bytes_per_s: float = 0.0,
        vocab_size: int = 1 << 32,
        on_change: Callable[[], None] | None = None,
        view: Callable[[], DiscoveryView] | None = None,
        prefix_tokens: int = 0,
    ) -> None:
        self.lost: list[tuple[str, int, str]] = []
        self.changes: list[str] = []
        self._told: list[Any] = []
        self._metrics = NodeMetrics(role="decode")
        self.peers = PrefillNodes(
            addresses,
            config=ConnectorConfig(
                tls=TlsConfig(insecure=1),
                heartbeat=HeartbeatConfig(interval_s=heartbeat_s),
                transport=TransportConfig(min_bandwidth_bytes_per_s=min_bandwidth_bytes_per_s),
                breaker=BREAKER,
            ),
            hellos=[replace(hello(0, incarnation=7), address="127.0.0.1:2", ring_bytes=ring_bytes, vocab_size=vocab_size)],
            security=PlainText(),
            decode_address="127.0.0.1:1",
            metrics=self._metrics,
            broadcast=self._told.append,
            on_lost=lambda peer, reason: self.lost.append((peer.address, self._told[-1].incarnation, reason)),
            on_change=on_change or self._note_change,
            view=view,
            prefix_tokens=prefix_tokens,
            clock=asyncio.get_running_loop().time,
        )

    @property
    def num_openings(self) -> float:
        return self._metrics.counter("breaker_openings").value

    @property
    def num_faults(self) -> float:
        return self._metrics.counter("join_faults").value

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
