"""A full ring and full pools: requests wait, and are served or refused with a reason; nothing blocks for good."""

from __future__ import annotations

import time

import pytest

from tests.cluster.calls import Reference, status_of, until
from tests.cluster.faults.conftest import MAX_QUEUED, POOL_TOKENS, RING_BYTES, Chaos
from tests.cluster.faults.scenario import CANCELLED, DEADLINE_EXCEEDED, RESOURCE_EXHAUSTED, Scenario

pytestmark = pytest.mark.timeout(180)

WAIT_S = 3.0


async def test_the_ring_is_full(tiers: Chaos, reference: Reference) -> None:
    """Several times what the ring holds is under way at once: grants wait for the watermark, and every request arrives."""
    async with Scenario(tiers, reference) as scene:
        status = await status_of(tiers.decode)
        assert status is not None
        before = {rank.rank: rank.watermark_position for rank in status.ranks}
        flights = [scene.begin(num_tokens, 8) for num_tokens in (1100, 900, 1000, 600)]

        async def is_open_grant_told() -> bool:
            status = await status_of(tiers.decode)
            return status is not None and any(rank.HasField("ring_oldest_open") for rank in status.ranks)

        await until(is_open_grant_told, "a rank tells its oldest open grant")
        await scene.over(flights)
        status = await status_of(tiers.decode)
        assert status is not None
        for rank in status.ranks:
            assert rank.ring_peak_bytes >= RING_BYTES, "the ring was never full"
            assert rank.watermark_position - before[rank.rank] > 3 * RING_BYTES, "it was not used round and round"


async def test_the_pool_is_full(tiers: Chaos, reference: Reference) -> None:
    """Who has a place in the queue waits for room, until its deadline at most; who has none is refused at once."""
    async with Scenario(tiers, reference) as scene:
        holding = scene.begin(100, 3900)  # and its room in the pool, for as long as it likes
        await until(lambda: len(holding.answer.tokens) > 3, "some tokens")
        too_many = POOL_TOKENS - 4000 + 200
        patient = scene.begin(too_many, 8)
        hasty = scene.begin(20, too_many, timeout_s=WAIT_S)
        begin_s = time.monotonic()
        fillers = [scene.begin(20, too_many) for _ in range(MAX_QUEUED - 2)]

        async def are_queued() -> bool:
            status = await status_of(tiers.decode)
            return status is not None and status.queued_requests == MAX_QUEUED

        await until(are_queued, "the queue is full", within_s=WAIT_S)
        with scene.fault():
            refused = scene.begin(5, 1)
        scene.ends([refused], RESOURCE_EXHAUSTED)
        (answer,) = await scene.over([refused])
        assert f"decode queue is full ({MAX_QUEUED} requests wait; limits.max_queued_requests)" in answer.details
        scene.ends([hasty], DEADLINE_EXCEEDED, within_s=2 * WAIT_S)
        await scene.over([hasty])
        assert time.monotonic() - begin_s >= WAIT_S and not patient.answer.tokens, "it has waited"
        for flight in (holding, *fillers):
            flight.task.cancel()
        scene.ends([holding, *fillers], CANCELLED)
