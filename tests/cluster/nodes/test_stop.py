"""SIGTERM drains: requests in flight finish, new ones are refused, and the exit code says whether all of them did."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import grpc
import pytest

from kvferry.local_cluster import ClusterNode, ClusterSpec, LocalCluster, TierSpec
from tests.cluster.calls import Caller, Reference, decode_control, prompt, status_of, until, until_arriving, until_idle
from tests.cluster.conftest import HEARTBEAT_S, POOL_TOKENS, START_TIMEOUT_S, Start
from transfer.pb import kvferry_pb2 as pb

pytestmark = pytest.mark.timeout(240)

LONG = 1500
LONGER = 3000  # its prefill outlasts several calls, on a fast machine too
DRAINED, CUT_OFF = 0, 5


@pytest.fixture(scope="module")
def cluster(model: Path, start: Start) -> Iterator[LocalCluster]:
    tier = TierSpec(model=model, pool_tokens=POOL_TOKENS)
    decode = replace(tier, settings={"limits.join_timeout_s": 0})  # without a prefill node requests are refused at once
    with start(ClusterSpec(prefill=tier, decode=decode, heartbeat_s=HEARTBEAT_S, start_timeout_s=START_TIMEOUT_S)) as cluster:
        yield cluster


async def until_ended(cluster: LocalCluster, node: ClusterNode) -> int:
    """The node's exit code, once it has ended and taken its ranks with it."""
    await until(lambda: node.exit_code is not None, f"the {node.role} node ended")
    assert node.exit_code is not None
    assert node.ready_file is None, "the ready file stays behind"
    return node.exit_code


async def until_draining(node: ClusterNode) -> None:
    async def is_draining() -> bool:
        status = await status_of(node)
        return status is not None and status.state == "draining"

    await until(is_draining, f"the {node.role} node drains")


async def test_prefill_node_finishes_what_it_sends(cluster: LocalCluster, reference: Reference) -> None:
    token_ids = prompt(LONGER)
    async with Caller(cluster.decode.address) as caller:
        _, task = caller.begin(token_ids, 16)
        await until_arriving(cluster.decode)
        cluster.prefill.terminate()
        await until_draining(cluster.prefill)
        assert (await cluster.prefill.readiness()).reason == "the node is draining"
        await until(lambda: is_refused(caller), "new requests are refused while the only prefill node drains")
        assert not task.done()
        reference.check(token_ids, await task)
    assert await until_ended(cluster, cluster.prefill) == DRAINED
    await until_idle(cluster.decode)
    cluster.launch("prefill")
    await cluster.wait_joined()


async def is_refused(caller: Caller) -> bool:
    answer = await caller.ask(prompt(5), 1)
    return answer.code is grpc.StatusCode.UNAVAILABLE


async def test_requests_are_cut_off_when_the_time_is_over(cluster: LocalCluster) -> None:
    cluster.decode.terminate()
    await until_ended(cluster, cluster.decode)
    impatient = replace(cluster.spec.decode, settings={"drain_timeout_s": 0.3})
    cluster.spec = replace(cluster.spec, decode=impatient)
    cluster.launch("decode")
    await cluster.wait_joined()
    async with Caller(cluster.decode.address) as caller:
        answer, task = caller.begin(prompt(20), 3000)
        await until(lambda: len(answer.tokens) > 3, "some tokens")
        cluster.decode.terminate()
        await asyncio.wait_for(task, 60)
        assert answer.code in (grpc.StatusCode.ABORTED, grpc.StatusCode.UNAVAILABLE), answer.details
        assert answer.details == "the node has shut down"
    assert await until_ended(cluster, cluster.decode) == CUT_OFF
    await until_idle(cluster.prefill)


async def test_drain_call_of_an_operator(cluster: LocalCluster, reference: Reference) -> None:
    cluster.launch("decode")
    await cluster.wait_joined()
    async with Caller(cluster.decode.address) as caller:
        answer, task = caller.begin(prompt(40), 200)
        await until(lambda: len(answer.tokens) > 3, "some tokens")
        stub = decode_control(caller.channel)
        remaining = (await stub.Drain(pb.DrainRequest(), timeout=30)).remaining
        assert remaining == 0
        reference.check(prompt(40), await asyncio.wait_for(task, 2))
        assert await is_refused(caller)
    cluster.decode.terminate()
    assert await until_ended(cluster, cluster.decode) == DRAINED
