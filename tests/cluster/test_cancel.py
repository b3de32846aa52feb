"""Requests that are given up, by their client, by a deadline, by an operator: a clear status, nothing left, others unharmed."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc
import pytest

from kvferry.local_cluster import LocalCluster
from kvferry.node_client import NodeClient
from tests.cluster.calls import Answer, Caller, Reference, prefill_control, prompt, status_of, until, until_idle
from transfer.pb import kvferry_pb2 as pb

pytestmark = pytest.mark.timeout(180)

LONG = 3000  # tokens; takes seconds to compute, so that its transfer is under way for as long
STATUS_S = 2.0


@asynccontextmanager
async def others(cluster: LocalCluster, reference: Reference) -> AsyncIterator[Caller]:
    """A client; beside the test's own requests it has others in flight, which must end right, and nothing may be left."""
    async with Caller(cluster.decode.address) as caller:
        prompts = [prompt(130, variant) for variant in (1, 2)]
        beside = [caller.begin(token_ids, 40)[1] for token_ids in prompts]
        yield caller
        for token_ids, answer in zip(prompts, await asyncio.gather(*beside), strict=True):
            reference.check(token_ids, answer)
        await until_idle(cluster.prefill, cluster.decode)


async def quickly(task: asyncio.Task[Answer], since_s: float) -> Answer:
    """The answer, which must have come within `STATUS_S`."""
    answer = await asyncio.wait_for(task, 30)
    assert answer.ended_s - since_s < STATUS_S, f"{answer.code} took {answer.ended_s - since_s:.1f} s"
    return answer


async def mid_transfer(cluster: LocalCluster, caller: Caller, request_id: str) -> tuple[Answer, asyncio.Task[Answer]]:
    """A long request of which some KV has arrived, and not all."""
    answer, task = caller.begin(prompt(LONG), 16, request_id=request_id)
    await until_bound_pages(cluster, LONG)
    assert not task.done() and not answer.tokens
    return answer, task


async def until_bound_pages(cluster: LocalCluster, num_tokens: int) -> None:
    """Wait until more pages are bound than the other requests of `others()` can have, and fewer than the whole prompt needs."""

    async def is_arriving() -> bool:
        status = await status_of(cluster.decode)
        return status is not None and any(rank.pool_pages_bound > 2 * 12 for rank in status.ranks)

    await until(is_arriving, "KV of the long request in the decode pool")


@pytest.mark.parametrize("when", ["mid-transfer", "mid-decode", "at once"])
async def test_client_goes_away(steady: LocalCluster, reference: Reference, when: str) -> None:
    async with others(steady, reference) as caller:
        if when == "mid-transfer":
            _, task = await mid_transfer(steady, caller, "leaves-early")
        elif when == "mid-decode":
            answer, task = caller.begin(prompt(100), 3000, request_id="leaves-late")
            await until(lambda: len(answer.tokens) >= 5, "five tokens")
        else:
            _, task = caller.begin(prompt(100), 16, request_id="never-stays")
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task


@pytest.mark.parametrize("where", ["decode", "prefill"])
async def test_operator_aborts_mid_transfer(steady: LocalCluster, reference: Reference, where: str) -> None:
    async with others(steady, reference) as caller:
        _, task = await mid_transfer(steady, caller, "unwanted")
        since_s = time.monotonic()
        if where == "decode":
            async with NodeClient(steady.decode.address) as client:
                assert await client.abort("unwanted", reason="it was a mistake")
        else:
            async with grpc.aio.insecure_channel(steady.prefill.address) as channel:
                stub = prefill_control(channel)
                assert (await stub.Abort(pb.AbortRequest(request_id="unwanted", reason="it was a mistake"))).found
        answer = await quickly(task, since_s)
        assert answer.code is grpc.StatusCode.ABORTED
        assert "it was a mistake" in answer.details
        assert answer.tokens == []


async def test_operator_aborts_mid_decode(steady: LocalCluster, reference: Reference) -> None:
    async with others(steady, reference) as caller, NodeClient(steady.decode.address) as client:
        answer, task = caller.begin(prompt(100), 3000, request_id="talks-too-much")
        await until(lambda: len(answer.tokens) >= 5, "five tokens")
        since_s = time.monotonic()
        assert await client.abort("talks-too-much")
        await quickly(task, since_s)
        assert (answer.code, answer.details) == (grpc.StatusCode.ABORTED, "aborted by an operator")
        assert not await client.abort("talks-too-much")
        assert not await client.abort("never-was")


@pytest.mark.parametrize("when", ["mid-transfer", "mid-decode"])
async def test_deadline_passes(steady: LocalCluster, reference: Reference, when: str) -> None:
    timeout_s = 1.5
    async with others(steady, reference) as caller:
        since_s = time.monotonic() + timeout_s
        token_ids, new = (prompt(LONG), 1000) if when == "mid-transfer" else (prompt(20), 3000)  # more than can be had in time
        answer, task = caller.begin(token_ids, new, timeout_s=timeout_s)
        await quickly(task, since_s)
        assert answer.code is grpc.StatusCode.DEADLINE_EXCEEDED


async def test_id_is_unique_while_in_flight_and_free_afterwards(steady: LocalCluster, reference: Reference) -> None:
    token_ids = prompt(60, 3)
    async with others(steady, reference) as caller:
        first, task = caller.begin(token_ids, 60, request_id="twice")
        await until(lambda: len(first.tokens) >= 1, "a token")
        second = await caller.ask(token_ids, answer=Answer(request_id="twice"))
        assert second.code is grpc.StatusCode.ABORTED
        assert second.details == "request_id twice is in flight already; ids must be unique"
        reference.check(token_ids, await task)
    async with Caller(steady.decode.address) as caller:
        reference.check(token_ids, await caller.ask(token_ids, answer=Answer(request_id="twice")))


async def test_storm_of_clients_that_go_away(steady: LocalCluster, reference: Reference) -> None:
    """Forty requests are given up at all stages of their life; those that stay, in between, are right."""
    staying = [(prompt(100 + 29 * number, 40 + number), 16) for number in range(4)]
    async with Caller(steady.decode.address) as caller, Caller(steady.decode.address) as leaver:
        stays: list[asyncio.Task[Answer]] = []
        for number in range(40):
            _, task = leaver.begin(prompt(50 + 23 * number, number), 200)
            asyncio.get_running_loop().call_later(0.02 * (number % 20), task.cancel)
            if number % 10 == 0:
                stays.append(caller.begin(*staying[number // 10])[1])
            await asyncio.sleep(0.03)
        for (token_ids, _), answer in zip(staying, await asyncio.gather(*stays), strict=True):
            reference.check(token_ids, answer)
    await until_idle(steady.prefill, steady.decode, within_s=10)
