"""A process that stands still for five seconds: requests that wait for it fail in time, and it is used again afterwards."""

from __future__ import annotations

import asyncio

import pytest

from tests.cluster.calls import Reference, frozen
from tests.cluster.faults.conftest import Chaos
from tests.cluster.faults.scenario import OK, UNAVAILABLE, Scenario

pytestmark = pytest.mark.timeout(180)

FROZEN_S = 5.0


@pytest.mark.parametrize("process", ["prefill rank", "decode rank", "prefill leader"])
async def test_a_process_is_frozen(tiers: Chaos, reference: Reference, process: str) -> None:
    """Requests in transfer fail in time, also if the leader alone stands still. The same processes go on afterwards."""
    node = tiers.decode if process == "decode rank" else tiers.prefill
    lives = tiers.lives()
    async with Scenario(tiers, reference) as scene:
        talking = await scene.generating(150)
        moving = await scene.arriving(2)
        with scene.fault(), frozen(node.rank_pids[1] if process.endswith("rank") else node.pid):
            thaw = asyncio.ensure_future(asyncio.sleep(FROZEN_S))
            scene.ends(moving, UNAVAILABLE)
            answers = await scene.over(moving)
            if process.endswith("rank"):
                assert any("silent" in answer.details for answer in answers), [answer.details for answer in answers]
            await thaw
        await scene.over([talking])
        await tiers.cluster.wait_joined(60)
        await scene.serves()
    assert tiers.lives() == lives, "the same lives go on"


async def test_the_decode_leader_is_frozen(tiers: Chaos, reference: Reference) -> None:
    """Its callers can only wait: each request ends once it goes on, by itself or because the prefill node has given it up."""
    lives = tiers.lives()
    async with Scenario(tiers, reference) as scene:
        talking = await scene.generating(150)
        moving = await scene.arriving(2)
        with scene.fault(), frozen(tiers.decode.pid):
            await asyncio.sleep(FROZEN_S)
        scene.ends(moving, OK, UNAVAILABLE, within_s=30)
        await scene.over([*moving, talking])
        await tiers.cluster.wait_joined(60)
        await scene.serves()
    assert tiers.lives() == lives, "the same lives go on"
