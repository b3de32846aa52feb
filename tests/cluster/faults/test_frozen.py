"""A process that stands still for five seconds: who waits for it hears in time, and once it goes on it is used again."""

from __future__ import annotations

import asyncio

import pytest

from kvferry.local_cluster.spec import Role
from tests.cluster.calls import Reference, frozen
from tests.cluster.faults.conftest import Chaos
from tests.cluster.faults.scenario import OK, UNAVAILABLE, Scenario

pytestmark = pytest.mark.timeout(180)

FROZEN_S = 5.0


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_a_rank_is_frozen(tiers: Chaos, reference: Reference, role: Role) -> None:
    node = tiers.prefill if role == "prefill" else tiers.decode
    lives = tiers.lives()
    async with Scenario(tiers, reference) as scene:
        talking = await scene.generating(150)
        moving = await scene.arriving(2)
        with scene.fault(), frozen(node.rank_pids[1]):
            thaw = asyncio.ensure_future(asyncio.sleep(FROZEN_S))
            scene.ends(moving, UNAVAILABLE)
            answers = await scene.over(moving)
            assert any("silent" in answer.details for answer in answers), [answer.details for answer in answers]
            if role == "prefill":
                # Whole already when the rank froze: it needs the prefill node for nothing any more.
                before = len(talking.answer.tokens)
                assert before > 0
            await thaw
        await scene.over([talking])
        await tiers.cluster.wait_joined(60)
        await scene.serves()
    assert tiers.lives() == lives, "the same lives go on"


async def test_the_prefill_leader_is_frozen(tiers: Chaos, reference: Reference) -> None:
    """Its ranks could go on; nobody can hear what becomes of a request, so it ends, and the ranks give it up."""
    lives = tiers.lives()
    async with Scenario(tiers, reference) as scene:
        await scene.generating(150)
        moving = await scene.arriving(2)
        with scene.fault(), frozen(tiers.prefill.pid):
            thaw = asyncio.ensure_future(asyncio.sleep(FROZEN_S))
            scene.ends(moving, UNAVAILABLE)
            await scene.over(moving)
            await thaw
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
