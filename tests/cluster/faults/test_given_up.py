"""Requests that are given up, by client, deadline or operator: a clear status, nothing left, others unharmed."""

from __future__ import annotations

import asyncio
import time

import grpc
import pytest

from kvferry.cli.node_client import NodeClient
from tests.cluster.calls import Answer, Caller, Reference, prefill_control, prompt, until
from tests.cluster.faults.conftest import Chaos
from tests.cluster.faults.scenario import ABORTED, CANCELLED, DEADLINE_EXCEEDED, Flight, Scenario
from transfer.pb import kvferry_pb2 as pb

pytestmark = pytest.mark.timeout(180)


async def mid_transfer(scene: Scenario, request_id: str = "") -> Flight:
    """A long request of which some KV has arrived, and not all; beside it others, of which one generates."""
    await scene.generating()
    (flight,) = await scene.arriving(1, request_id=request_id)
    scene.begin(140, 16)
    return flight


@pytest.mark.parametrize("when", ["mid-transfer", "mid-decode", "at once"])
async def test_client_goes_away(tiers: Chaos, reference: Reference, when: str) -> None:
    async with Scenario(tiers, reference) as scene:
        if when == "mid-transfer":
            flight = await mid_transfer(scene, "leaves-early")
        elif when == "mid-decode":
            flight = await scene.generating(3000)
        else:
            flight = scene.begin(100, 16)
            await asyncio.sleep(0)
        with scene.fault():
            flight.task.cancel()
        scene.ends([flight], CANCELLED)


@pytest.mark.parametrize("where", ["decode", "prefill"])
async def test_operator_aborts_mid_transfer(tiers: Chaos, reference: Reference, where: str) -> None:
    async with Scenario(tiers, reference) as scene:
        flight = await mid_transfer(scene, "unwanted")
        with scene.fault():
            if where == "decode":
                async with NodeClient(tiers.decode.address) as client:
                    assert await client.abort("unwanted", reason="it was a mistake")
            else:
                async with grpc.aio.insecure_channel(tiers.prefill.address) as channel:
                    stub = prefill_control(channel)
                    assert (await stub.Abort(pb.AbortRequest(request_id="unwanted", reason="it was a mistake"))).found
        scene.ends([flight], ABORTED)
        (answer,) = await scene.over([flight])
        assert "it was a mistake" in answer.details
        assert answer.tokens == []


@pytest.mark.parametrize("when", ["mid-transfer", "mid-decode"])
async def test_deadline_passes(tiers: Chaos, reference: Reference, when: str) -> None:
    timeout_s = 1.0
    async with Scenario(tiers, reference) as scene:
        await scene.generating()
        num_tokens, new = (3000, 1000) if when == "mid-transfer" else (20, 3000)  # more than can be had in time
        flight = scene.begin(num_tokens, new, timeout_s=timeout_s)
        await asyncio.sleep(timeout_s)
        with scene.fault():
            pass  # the deadline itself
        scene.ends([flight], DEADLINE_EXCEEDED)


async def test_id_is_unique_while_in_flight_and_free_afterwards(tiers: Chaos, reference: Reference) -> None:
    token_ids = prompt(60, 3)
    async with Scenario(tiers, reference), Caller(tiers.decode.address) as caller:
        first, task = caller.begin(token_ids, 60, request_id="twice")
        await until(lambda: len(first.tokens) >= 1, "a token")
        second = await caller.ask(token_ids, answer=Answer(request_id="twice"))
        assert second.code is grpc.StatusCode.ABORTED
        assert second.details == "request_id twice is in flight already; ids must be unique"
        reference.check(token_ids, await task)
        reference.check(token_ids, await caller.ask(token_ids, answer=Answer(request_id="twice")))


async def test_storm_of_clients_that_go_away(tiers: Chaos, reference: Reference) -> None:
    """Forty requests are given up at all stages of their life; those that stay, in between, are right."""
    async with Scenario(tiers, reference) as scene, Caller(tiers.decode.address) as leaver:
        begin_s = time.monotonic()
        for number in range(40):
            _, task = leaver.begin(prompt(50 + 23 * number, number), 200)
            asyncio.get_running_loop().call_later(0.02 * (number % 20), task.cancel)
            if number % 10 == 0:
                scene.begin(100 + 29 * number // 10, 16)
            await asyncio.sleep(0.03)
        assert time.monotonic() - begin_s < 60
