"""Control messages and acks that are lost, said twice, or overtaken: every request arrives whole, and nothing leaks."""

from __future__ import annotations

import asyncio

import pytest

from tests.cluster.calls import Reference
from tests.cluster.faults.conftest import Chaos
from tests.cluster.faults.scenario import CANCELLED, Scenario

pytestmark = pytest.mark.timeout(180)

FAULTS = {
    "lost": {"lose": 0.15},
    "repeated": {"repeat": 0.5},
    "reordered": {"hold": 0.3, "hold_s": 0.1},
    "all of it": {"lose": 0.1, "repeat": 0.2, "hold": 0.2, "hold_s": 0.2},
}
LETTERS = {"lost": "L", "repeated": "R", "reordered": "H", "all of it": "LRH"}


@pytest.mark.parametrize("what", ["lost", "repeated", "reordered", "all of it"])
async def test_control_messages_and_acks(tiers: Chaos, reference: Reference, what: str) -> None:
    """Grants, ready messages and watermarks of requests that share the ring; one of them is given up meanwhile."""
    before = len(tiers.done())
    async with Scenario(tiers, reference) as scene:
        tiers.disturb(control=FAULTS[what], watermark=FAULTS[what])
        flights = [scene.begin(num_tokens, 8) for num_tokens in (300, 40, 500)]
        (leaver,) = await scene.arriving(1, num_tokens=900)
        with scene.fault():
            leaver.task.cancel()
        scene.ends([leaver], CANCELLED)
        await scene.over(flights)
    assert set(tiers.done()[before:]) == set(LETTERS[what]), "nothing was done to the messages"


@pytest.mark.parametrize("what", ["watermark", "control"])
async def test_nothing_comes_through_for_a_while(tiers: Chaos, reference: Reference, what: str) -> None:
    """Two seconds without a single ack, or a single control message, while the sessions live: it waits, and goes on by itself."""
    async with Scenario(tiers, reference) as scene:
        await scene.generating()
        flights = await scene.arriving(2, num_tokens=900)
        tiers.disturb(**{what: {"lose": 1.0}})
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.shield(asyncio.gather(*(flight.task for flight in flights))), 2.0)
        tiers.disturb()
        await scene.over(flights)
