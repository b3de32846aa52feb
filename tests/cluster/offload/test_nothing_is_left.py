"""Many requests that end in every way there is, with copies in flight: nothing of them is left, and those that stay are right.

They finish; they are given up while they wait, while they arrive or are loaded, and while they run; their time runs out; a
prefill node dies under them. A drain ends in time with saves and backups in flight.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from kvferry.local_cluster.cluster import LocalCluster
from tests.cluster.calls import Caller, Reference, prompt, until
from tests.cluster.conftest import Start
from tests.cluster.faults.conftest import warm_up
from tests.cluster.faults.scenario import Tiers
from tests.cluster.offload.clusters import EARLY, number, spec, stored_files, until_all_is_back

NUM_PROMPTS = 12
NEW = 6
WANTED = {"stays": NEW, "leaves": 60, "runs out": 300}  # nobody is done with so many when his time runs out
IN_FLIGHT = 12
ROOM = {"limits.max_queued_requests": 64, "limits.queue_timeout_s": 300}
ENDS = {grpc.StatusCode.OK, grpc.StatusCode.CANCELLED, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.UNAVAILABLE}


@pytest.fixture(scope="module")
def cluster(model: Path, directory: Path, start: Start) -> Iterator[LocalCluster]:
    """A device pool for four requests or so, host memory that is always full, and a store that evicts."""
    small = {"offload.host_ratio": 3, "storage.directory": directory, "storage.max_bytes": 40 << 20}
    with start(spec(model, dict(EARLY) | small | ROOM, prefill=ROOM, pool_tokens=400)) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def tiers(cluster: LocalCluster) -> Tiers:
    found = Tiers(prefill=cluster.prefill, decode=cluster.decode)
    asyncio.run(warm_up(found))
    return found


async def storm(tiers: Tiers, reference: Reference, *, num_requests: int, kill_at: int | None = None) -> Counter[str]:
    """So many requests, a dozen at a time, of a few prompts that have beginnings in common; how many ended how."""
    chance, ends = random.Random(num_requests), Counter[str]()
    prompts = [(*prompt(chance.choice([40, 120, 250]), variant % 3), *prompt(17, variant)) for variant in range(NUM_PROMPTS)]
    for token_ids in prompts:
        reference.tokens(token_ids, NEW)  # before, so that nobody waits for it
    gate = asyncio.Semaphore(IN_FLIGHT)

    async def one(caller: Caller, number: int) -> None:
        token_ids, how = chance.choice(prompts), chance.choice(["stays", "stays", "leaves", "leaves", "runs out"])
        timeout_s = chance.uniform(0.02, 0.6) if how == "runs out" else 120.0
        leaves_s, runs_first = chance.expovariate(3.0), chance.random() < 0.4
        async with gate:
            if number == kill_at:
                os.kill(tiers.prefill.rank_pids[0], signal.SIGKILL)
            answer, task = caller.begin(token_ids, WANTED[how], timeout_s=timeout_s)
            if how == "leaves":
                if runs_first:
                    await until(lambda: bool(answer.tokens) or task.done(), "a token", within_s=120)
                else:
                    await asyncio.wait([task], timeout=leaves_s)
                task.cancel()
            await asyncio.wait([task])
        if task.cancelled():
            ends["left"] += 1
            return
        assert answer.code in ENDS, f"{answer.code}: {answer.details}"
        ends[answer.code.name] += 1
        if answer.code is grpc.StatusCode.OK:
            reference.check(token_ids, answer) if how == "stays" else None
        elif how == "stays":
            assert kill_at is not None and answer.code is grpc.StatusCode.UNAVAILABLE, answer.details

    async with Caller(tiers.decode.address) as caller:
        await asyncio.gather(*(one(caller, number) for number in range(num_requests)))
    await tiers.until_idle(within_s=120)
    await until_all_is_back(tiers.prefill, tiers.decode)
    return ends


@pytest.mark.timeout(900)
async def test_nothing_is_left_of_many(tiers: Tiers, reference: Reference) -> None:
    """In their midst the prefill rank dies."""
    lives, released = tiers.decode.incarnation, await number(tiers.decode, "kvferry_offload_released_pages_total")
    ends = await storm(tiers, reference, num_requests=400, kill_at=160)
    assert min(ends[end] for end in ("OK", "left", "DEADLINE_EXCEEDED")) >= 20, ends
    assert tiers.decode.incarnation == lives, "the decode ranks were to live through it"
    assert await number(tiers.decode, "kvferry_offload_released_pages_total") > released


@pytest.mark.timeout(120)
async def test_a_drain_with_saves_and_backups_in_flight(
    cluster: LocalCluster, tiers: Tiers, reference: Reference, directory: Path
) -> None:
    """It ends in good order, with those who ran served, and in the store is nothing half-written."""
    token_ids, before = prompt(300, 77), set(stored_files(directory))
    reference.tokens(token_ids, 30)  # before, so that nobody waits for it
    async with Caller(tiers.decode.address) as caller:
        answer, task = caller.begin(token_ids, 30)
        await until(lambda: bool(answer.tokens), "a token")
        tiers.decode.terminate()
        reference.check(token_ids, await task)
    await until(lambda: tiers.decode.exit_code is not None, "the decode node ended", within_s=60)
    assert tiers.decode.exit_code == 0
    assert set(stored_files(directory)) - before, "nothing of it was stored"
    assert not list(directory.rglob(".writing-*"))
