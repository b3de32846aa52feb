"""What a decode rank counts, and what it takes of what a writer tells of their link."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, cast

import pytest

from decode_node import receiver_events as protocol
from decode_node.rank_messages import LinkProbed, WriterLost
from decode_node.receiver_loop import ReceiverLoop
from decode_node.worker import DecodeWorker, _Writer
from node_runtime.rank_link import RankLink
from node_runtime.rank_process import RankSpec
from tests.runtime.instances import LAYOUT, decode_config, instance, until
from tests.runtime.scattered_tiers import ScatteredTiers
from transfer.instance import Link
from transfer.layout import Shard
from transfer.metrics import RankMetrics

SESSION = 5


class OneSession:
    """A decode rank 3 with one attached writer, prefill rank 1, and without an engine; also its leader and its receiver."""

    def __init__(self, folder: Path, *, floor_bytes_per_s: float = 0.0) -> None:
        config = decode_config(folder, transport={"min_bandwidth_bytes_per_s": floor_bytes_per_s})
        spec = RankSpec(config=config, rank=3, incarnation=2, address=cast(Any, None), rendezvous=folder / "none")
        self.sent: list[Any] = []
        self.closed: list[tuple[int, str]] = []
        self.worker = DecodeWorker(spec, cast(RankLink, self), asyncio.get_running_loop())
        self.worker._receiver = cast(Any, self)
        self.worker._servicer = cast(Any, self)
        self.worker._writers[SESSION] = _Writer(
            instance=instance(1), rank=1, routes=(), lane="ucx/shm", digest="xxh3-64", scales=None
        )

    def send(self, message: object) -> None:
        self.sent.append(message)

    def close_session(self, session: int, reason: str) -> None:
        if (session, reason) not in self.closed:
            self.closed.append((session, reason))
            self.worker.on_session_closed(session, reason)

    def report(self, *, session: int = SESSION, bandwidth_bytes_per_s: float = 2e9) -> None:
        """The writer's report, which is wrong about everything but the numbers."""
        self.worker._on_link(
            session,
            Link(
                prefill_rank=60_000,
                decode_rank=9,
                lane="made up",
                latency_s=1e-5,
                bandwidth_bytes_per_s=bandwidth_bytes_per_s,
            ),
        )

    @property
    def labels(self) -> list[dict[str, str]]:
        """Of every series of a link."""
        families = self.worker._metrics.snapshot({})["families"]
        return [labels for name in families if "_link_" in name for _, labels, _ in families[name]]


async def test_who_has_a_link_is_known_here_and_only_its_numbers_are_the_writers(tmp_path: Path) -> None:
    one = OneSession(tmp_path)
    one.report()
    link = Link(prefill_rank=1, decode_rank=3, lane="ucx/shm", latency_s=1e-5, bandwidth_bytes_per_s=2e9)
    assert one.sent == [LinkProbed(link=link)]
    assert one.labels == 2 * [{"role": "decode", "prefill_rank": "1", "decode_rank": "3", "lane": "ucx/shm"}]


async def test_a_writer_that_reports_its_link_again_and_again_is_heard_once(tmp_path: Path) -> None:
    one = OneSession(tmp_path)
    for _ in range(3):
        one.report()
    assert len(one.sent) == 1


async def test_the_series_of_a_link_end_with_its_session(tmp_path: Path) -> None:
    one = OneSession(tmp_path)
    one.report()
    one.close_session(SESSION, "the writer is silent")
    assert one.labels == []
    assert one.sent[1:] == [WriterLost(incarnation=1, prefill_rank=1, reason="the writer is silent")]
    one.report()
    assert one.labels == [] and len(one.sent) == 2, "a report that comes too late is of no session"


async def test_the_end_of_a_session_that_its_writer_has_replaced_is_no_loss(tmp_path: Path) -> None:
    one = OneSession(tmp_path)
    one.worker._writers[SESSION + 1] = one.worker._writers[SESSION]
    one.close_session(SESSION, "attached again")
    assert one.sent == []
    one.close_session(SESSION + 1, "gone")
    assert one.sent == [WriterLost(incarnation=1, prefill_rank=1, reason="gone")]


async def test_a_link_below_the_decode_nodes_floor_is_closed_with_both_numbers(tmp_path: Path) -> None:
    one = OneSession(tmp_path, floor_bytes_per_s=3e9)
    one.report(bandwidth_bytes_per_s=2e9)
    assert one.closed == [
        (
            SESSION,
            "link from prefill rank 1 over ucx/shm makes 2e+09 bytes/s; "
            "transport.min_bandwidth_bytes_per_s of the decode node is 3e+09",
        )
    ]
    assert [type(message) for message in one.sent] == [WriterLost] and one.labels == []
    fast = OneSession(tmp_path, floor_bytes_per_s=2e9)
    fast.report(bandwidth_bytes_per_s=2e9)
    assert fast.closed == [] and len(fast.sent) == 1


class FirstIsBroken(ReceiverLoop):
    """The first piece that is looked at has a flipped bit."""

    is_flipped = False

    def _scatter(self, action: protocol.StartScatter) -> None:
        if not self.is_flipped:
            self.is_flipped = True
            self._ring_memory.tensor[action.grant.begin % self._ring_memory.num_bytes] ^= 1
        super()._scatter(action)


def counts(metrics: RankMetrics) -> dict[str, float]:
    families = metrics.snapshot({})["families"]
    return {name: value for family in families.values() for name, labels, value in family if "bucket" not in name}


@pytest.mark.parametrize("is_broken", [False, True])
async def test_only_intact_pieces_count_as_transferred(is_broken: bool) -> None:
    num_tokens, num_chunks = 60, 3  # chunks of 24 tokens, both layers in each
    receiver_type = FirstIsBroken if is_broken else ReceiverLoop
    tiers = ScatteredTiers(LAYOUT, Shard(page_size=16), Shard(page_size=8), is_one_sided=True, receiver_type=receiver_type)
    (receiver,) = tiers.receivers
    tiers.start("a", num_tokens)
    await tiers.compute("a", num_tokens)
    await until(lambda: "a" in receiver.complete and tiers.is_idle())
    found = counts(receiver.loop._metrics)
    assert found["kvferry_broken_chunks_total"] == is_broken
    assert found["kvferry_chunks_total"] == found["kvferry_stage_seconds_count"] == num_chunks
    assert found["kvferry_transferred_bytes_total"] == num_tokens * LAYOUT.num_layers * 2 * 4 * 4 * 2
    tiers.close()
