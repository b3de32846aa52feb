"""A decode rank's sessions with its writers: who may attach, who is received from, and what a link's report counts for."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import AsyncMock

import pytest
import torch

from tests.runtime.instances import instance
from transfer.chunk import ChunkPlan
from transfer.config import ServerConfig, TransportConfig
from transfer.errors import ChunkTooLarge, LayoutError, ResourceExhausted
from transfer.instance import AttachRequest, Instance, Link
from transfer.metrics import FamilyCollector, RankMetrics
from transfer.piece import TransferTerms
from transfer.pool.staging import StagingBuffer
from transfer.rank_context import RankContext
from transfer.receive.attach import PrefillSessions, Receiving, Unattached
from transfer.registry.options import MAX_SESSIONS
from transfer.ring import StagingAllocator
from transfer.transport.inproc import InprocHub, InprocTransport

PREFILL_LIFE, DECODE_LIFE = 11, 22
PLAN = ChunkPlan(chunk_tokens=4)
RING_BYTES = 1 << 16


class Rank:
    """Decode rank `rank`, whose receiver is the test's."""

    def __init__(
        self,
        *,
        rank: int = 0,
        own: Instance | None = None,
        ring_bytes: int = RING_BYTES,
        num_ending: int = 0,
        floor_bytes_per_s: float = 0.0,
    ) -> None:
        self.hub = InprocHub()
        self.metrics = RankMetrics(role="decode", rank=rank)
        self.lost: list[tuple[int, int, str]] = []
        self.probed: list[Link] = []
        self.closed: list[tuple[int, str]] = []
        self.opened: list[int] = []
        transport = InprocTransport(self.hub, one_sided=True)
        receiver = SimpleNamespace(
            ring=StagingAllocator(ring_bytes, incarnation=DECODE_LIFE),
            num_ending=num_ending,
            memory=transport.register(StagingBuffer(num_bytes=ring_bytes).tensor),
            copier=AsyncMock(),  # its warm_up() does nothing
            driver=SimpleNamespace(add=lambda session: None),
            watch_sessions=self.watch_sessions,
            open_session=lambda number, session, incarnation, control_key: self.opened.append(number),
            close_session=self.close_session,
            sessions_in_use=frozenset,
        )
        self.sessions = PrefillSessions(
            context=RankContext(
                loop=asyncio.get_running_loop(),
                instance=own or instance(DECODE_LIFE),
                rank=rank,
                device=torch.device("cpu"),
                transport=transport,
                transport_config=TransportConfig(min_bandwidth_bytes_per_s=floor_bytes_per_s),
                metrics=self.metrics,
                on_crash=lambda error: pytest.fail(repr(error)),
            ),
            receiving=Receiving(
                loop=cast(Any, receiver),
                control=cast(Any, SimpleNamespace(address="inproc", local_address="", public_key=bytes(32))),
                scratch=None,
            ),
            server=ServerConfig(),
            heartbeat_s=0.5,
            on_writer_lost=lambda *loss: self.lost.append(loss),
            on_link_probed=self.probed.append,
        )

    async def attach(self, prefill: Instance, rank: int = 0) -> int:
        """Attach that prefill rank; returns the session."""
        offer = InprocTransport(self.hub, one_sided=True).offer()  # one that is dropped cannot be accepted
        request = AttachRequest(
            prefill=prefill,
            prefill_rank=rank,
            offer=offer.blob,
            chunk_plan=PLAN,
            probe_bytes=1 << 12,
            control_key=bytes(32),
        )
        return (await self.sessions.on_attach(request)).session_id

    def watch_sessions(self, on_closed: Callable[[int, str], None], publish: object) -> None:
        self.on_session_closed = on_closed

    def close_session(self, session: int, reason: str) -> None:
        if (session, reason) not in self.closed:
            self.closed.append((session, reason))
            self.on_session_closed(session, reason)

    def report(self, session: int, *, bandwidth_bytes_per_s: float = 2e9) -> None:
        """The writer's report, which is wrong about everything but the numbers."""
        self.sessions.on_link(
            session,
            Link(prefill_rank=60_000, decode_rank=9, lane="made up", latency_s=1e-5, bandwidth_bytes_per_s=bandwidth_bytes_per_s),
        )

    @property
    def labels(self) -> list[dict[str, str]]:
        """Of every series of a link."""
        self.metrics.snapshot({})
        return [
            sample.labels
            for family in FamilyCollector(self.metrics.families()).collect()
            if "_link_" in family.name
            for sample in family.samples
        ]


async def test_a_request_can_come_whole_from_all_its_writers_only() -> None:
    rank = Rank()
    prefill = instance(PREFILL_LIFE, tp_size=2)
    assert rank.sessions.writers_of(PREFILL_LIFE) == Unattached(reason="no rank of the prefill instance is attached")
    first = await rank.attach(prefill, 0)
    await rank.attach(instance(PREFILL_LIFE + 1, tp_size=2), 1)
    assert rank.sessions.writers_of(PREFILL_LIFE) == Unattached(reason="prefill rank 1 is not attached")
    second = await rank.attach(prefill, 1)
    assert isinstance(rank.sessions.writers_of(PREFILL_LIFE), TransferTerms)
    rank.sessions.forget_prefill(PREFILL_LIFE, "it has left")
    assert rank.closed == [(first, "it has left"), (second, "it has left")]
    assert rank.lost == [(PREFILL_LIFE, 0, "it has left"), (PREFILL_LIFE, 1, "it has left")]
    assert isinstance(rank.sessions.writers_of(PREFILL_LIFE), Unattached)


async def test_an_attach_that_cannot_be_is_offered_nothing() -> None:
    """A misfit names the sides as the prefill node does. Sessions that are closed, and whose writers let go of nothing, have a
    limit, too: nothing can take a writer's mapping of the ring back."""
    for rank, prefill, kind, complaint in (
        (
            Rank(own=instance(DECODE_LIFE, weights="decode's")),
            instance(PREFILL_LIFE, weights="prefill's"),
            LayoutError,
            "prefill != decode: model weights: prefill's != decode's",
        ),
        (
            Rank(ring_bytes=256),
            instance(PREFILL_LIFE),
            ChunkTooLarge,
            r"ring\.capacity_bytes is 256 on decode rank 0; a chunk of 4 tokens and all layers",
        ),
        (
            Rank(num_ending=MAX_SESSIONS),
            instance(PREFILL_LIFE),
            ResourceExhausted,
            r"1024 sessions of decode rank 0 are closed, and their writers may still write",
        ),
    ):
        with pytest.raises(kind, match=complaint):
            await rank.attach(prefill)
        assert not rank.opened


async def one_session(*, floor_bytes_per_s: float = 0.0) -> tuple[Rank, int]:
    """Decode rank 3 with one attached writer, prefill rank 1."""
    rank = Rank(rank=3, own=instance(DECODE_LIFE, tp_size=4), floor_bytes_per_s=floor_bytes_per_s)
    return rank, await rank.attach(instance(PREFILL_LIFE, tp_size=2), 1)


async def test_a_links_names_are_local_and_only_its_measurements_come_from_the_writer() -> None:
    """They are heard once, however often they are reported."""
    one, session = await one_session()
    for _ in range(3):
        one.report(session)
    link = Link(prefill_rank=1, decode_rank=3, lane="inproc", latency_s=1e-5, bandwidth_bytes_per_s=2e9)
    assert one.probed == [link]
    assert one.labels == 2 * [{"role": "decode", "rank": "3", "prefill_rank": "1", "decode_rank": "3", "lane": "inproc"}]


async def test_the_series_of_a_link_end_with_its_session() -> None:
    one, session = await one_session()
    one.report(session)
    one.close_session(session, "the writer is silent")
    assert one.labels == []
    assert one.lost == [(PREFILL_LIFE, 1, "the writer is silent")]
    one.report(session)
    assert one.labels == [] and len(one.probed) == len(one.lost) == 1, "a report that comes too late is of no session"


async def test_the_end_of_a_session_that_its_writer_has_replaced_is_no_loss() -> None:
    one, session = await one_session()
    again = await one.attach(instance(PREFILL_LIFE, tp_size=2), 1)
    one.close_session(session, "attached again")
    assert one.lost == []
    one.close_session(again, "gone")
    assert one.lost == [(PREFILL_LIFE, 1, "gone")]


async def test_a_link_below_the_decode_nodes_floor_is_closed_with_both_numbers() -> None:
    one, session = await one_session(floor_bytes_per_s=3e9)
    one.report(session, bandwidth_bytes_per_s=2e9)
    floor = "transport.min_bandwidth_bytes_per_s of the decode node is 3e+09"
    reason = f"link from prefill rank 1 over inproc makes 2e+09 bytes/s; {floor}"
    assert one.closed == [(session, reason)]
    assert len(one.lost) == 1 and not one.probed and one.labels == []
    fast, session = await one_session(floor_bytes_per_s=2e9)
    fast.report(session, bandwidth_bytes_per_s=2e9)
    assert fast.closed == [] and len(fast.probed) == 1
