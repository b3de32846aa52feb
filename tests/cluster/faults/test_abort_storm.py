"""Five hundred requests of which nine in ten are given up: those that stay lose nothing by it, and nothing is left behind."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest

from kvferry.local_cluster import ClusterSpec, LocalCluster, TierSpec
from tests.cluster.calls import Answer, Caller, Reference, prompt
from tests.cluster.conftest import START_TIMEOUT_S, running
from tests.cluster.faults.conftest import warm_up
from tests.cluster.faults.scenario import Tiers

pytestmark = pytest.mark.timeout(900)

NUM_REQUESTS, ONE_STAYS_OF = 500, 10
ARRIVAL_S = 0.03
LONGEST_STAY_S = 3.0
NEW_TOKENS = 8
NUM_PROMPTS = 25
BOUND_S = 600.0


@pytest.fixture(scope="module")
def small(model: Path) -> Iterator[Tiers]:
    """Room for some ten requests at a time, in the ring for three: what an abort kept would soon stop all others."""
    room = {"limits.max_queued_requests": NUM_REQUESTS, "limits.queue_timeout_s": BOUND_S}
    spec = ClusterSpec(
        prefill=TierSpec(model=model, tp_size=2, page_size=16, pool_tokens=4096, settings=room),
        decode=TierSpec(model=model, tp_size=1, page_size=32, pool_tokens=4096, settings=room),
        ring_bytes=1 << 20,
        start_timeout_s=START_TIMEOUT_S,
    )
    with running(LocalCluster(spec)) as cluster:
        tiers = Tiers(prefill=cluster.prefill, decode=cluster.decode, prefill_ranks=2, decode_ranks=1, sessions=2)
        asyncio.run(warm_up(tiers))
        yield tiers


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What became of those that stayed.

    Attributes:
        tokens_per_s: Their generated tokens, over the time from the first arrival to the end of the last of them.
        num_given_up: Requests that were aborted before their end.
    """

    tokens_per_s: float
    num_given_up: int


async def load(tiers: Tiers, reference: Reference, *, has_aborts: bool) -> Outcome:
    """The same requests at the same times; with aborts, nine in ten are given up at a random moment."""
    chance = random.Random(7)
    prompts = [prompt(chance.randint(20, 300), variant) for variant in range(NUM_PROMPTS)]
    stays: list[tuple[tuple[int, ...], asyncio.Task[Answer]]] = []
    async with Caller(tiers.decode.address) as caller, Caller(tiers.decode.address) as leaver:
        began_s = time.monotonic()
        leaving: list[asyncio.Task[Answer]] = []
        for number in range(NUM_REQUESTS):
            token_ids, stay_s = chance.choice(prompts), chance.uniform(0, LONGEST_STAY_S)
            if number % ONE_STAYS_OF == 0:
                stays.append((token_ids, caller.begin(token_ids, NEW_TOKENS, timeout_s=BOUND_S)[1]))
            else:
                _, task = leaver.begin(token_ids, NEW_TOKENS, timeout_s=BOUND_S)
                leaving.append(task)
                if has_aborts:
                    asyncio.get_running_loop().call_later(stay_s, task.cancel)
            await asyncio.sleep(max(0.0, began_s + (number + 1) * ARRIVAL_S - time.monotonic()))
        answers = await asyncio.gather(*(task for _, task in stays))
        ended_s = time.monotonic()
        ends = await asyncio.gather(*leaving, return_exceptions=True)
    for (token_ids, _), answer in zip(stays, answers, strict=True):
        reference.check(token_ids, answer)
    given_up = [end for end in ends if isinstance(end, asyncio.CancelledError)]
    for end in ends:
        if end not in given_up:
            assert isinstance(end, Answer) and end.code is grpc.StatusCode.OK, end
    return Outcome(tokens_per_s=sum(len(answer.tokens) for answer in answers) / (ended_s - began_s), num_given_up=len(given_up))


async def test_those_who_stay_lose_nothing_to_those_who_leave(small: Tiers, reference: Reference) -> None:
    calm = await load(small, reference, has_aborts=False)
    await small.until_idle(within_s=10)
    storm = await load(small, reference, has_aborts=True)
    await small.until_idle(within_s=10)  # nothing waits for a time-out: the shortest that there is takes longer
    print(f"tokens a second of those who stay: {calm.tokens_per_s:.1f} without aborts, {storm.tokens_per_s:.1f} with them")
    assert calm.num_given_up == 0
    assert storm.num_given_up > 0.5 * NUM_REQUESTS, "most were still in flight when they were given up"
    assert storm.tokens_per_s > 0.8 * calm.tokens_per_s
    for node in small.nodes:
        lost = [event for name in ("session_closed", "prefill_node_lost", "rank_group_lost") for event in node.log.events(name)]
        assert not lost, lost
