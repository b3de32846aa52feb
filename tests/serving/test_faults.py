"""Requests survive a killed rank, a frozen rank, a rolling restart and a drain. `make test-cluster` tests other faults."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import grpc
import pytest
from prometheus_client.parser import text_string_to_metric_families

from kvferry.local_cluster.cluster import ClusterNode, ClusterSpec, LocalCluster, TierSpec
from tests.cluster.calls import Caller, Reference, prompt, status_of, until, until_idle
from tests.cluster.conftest import HEARTBEAT_S, START_TIMEOUT_S, running

LONG = 900


@pytest.fixture(scope="module")
def started(model: Path) -> Iterator[LocalCluster]:
    # 800 tokens can take longer than the default limit of a drain on a busy machine.
    settings = {"restart.backoff_s": 0.1, "restart.max_restarts": 10, "drain_timeout_s": 300}
    tier = TierSpec(model=model, pool_tokens=8192, settings=settings)
    spec = ClusterSpec(prefill=tier, decode=tier, num_prefill=2, heartbeat_s=HEARTBEAT_S, start_timeout_s=START_TIMEOUT_S)
    with running(spec) as cluster:
        yield cluster


@pytest.fixture
async def cluster(started: LocalCluster) -> AsyncIterator[LocalCluster]:
    """Return the cluster with all nodes joined; after the test, wait until it is idle."""
    await started.wait_joined()
    yield started
    await until_idle(*(node for node in started.nodes if node.exit_code is None))


async def num_retries(decode: ClusterNode) -> float:
    _, page = await decode.http("/metrics")
    families = text_string_to_metric_families(page)
    return sum(sample.value for family in families for sample in family.samples if sample.name == "kvferry_retries_total")


async def is_at_work(node: ClusterNode) -> bool:
    status = await status_of(node)
    return status is not None and status.running_requests + status.queued_requests > 0


async def test_requests_of_a_killed_prefill_rank_complete_on_the_other_node(cluster: LocalCluster, reference: Reference) -> None:
    """The node of the rank starts a new rank."""
    killed, before = cluster.prefill, await num_retries(cluster.decode)
    incarnation = killed.incarnation
    prompts = [prompt(LONG, variant) for variant in range(4)]
    async with Caller(cluster.decode.address) as caller:
        flights = [caller.begin(token_ids, 4)[1] for token_ids in prompts]
        await until(lambda: is_at_work(killed), "a request on the node")
        os.kill(killed.rank_pids[0], signal.SIGKILL)
        for token_ids, flight in zip(prompts, flights, strict=True):
            reference.check(token_ids, await flight)
    assert await num_retries(cluster.decode) > before
    await until(lambda: killed.lives_anew(incarnation), "a new rank", within_s=START_TIMEOUT_S)
    await cluster.wait_joined()


async def test_requests_of_a_frozen_prefill_rank_complete_on_the_other_node(cluster: LocalCluster, reference: Reference) -> None:
    """When the rank runs again, the decode node joins its node again."""
    frozen, before = cluster.prefill_nodes[1].rank_pids[0], await num_retries(cluster.decode)
    prompts = [prompt(LONG, 10 + variant) for variant in range(4)]
    async with Caller(cluster.decode.address) as caller:
        os.kill(frozen, signal.SIGSTOP)
        try:  # the decode node still sends requests to both nodes
            flights = [caller.begin(token_ids, 4)[1] for token_ids in prompts]
            for token_ids, flight in zip(prompts, flights, strict=True):
                reference.check(token_ids, await flight)
        finally:
            with contextlib.suppress(ProcessLookupError):  # its node has ended it, because it was silent for too long
                os.kill(frozen, signal.SIGCONT)
    assert await num_retries(cluster.decode) > before
    await cluster.wait_joined()


async def test_no_request_fails_while_prefill_nodes_restart_in_turn(cluster: LocalCluster, reference: Reference) -> None:
    """A service manager restarts a service in the same way: SIGTERM, then a new process."""
    is_over = asyncio.Event()
    incarnations = [node.incarnation for node in cluster.prefill_nodes]
    num_served = 0

    async def ask(caller: Caller, number: int) -> None:
        nonlocal num_served
        while not is_over.is_set():
            token_ids = prompt(150 + number, num_served % 8)
            reference.check(token_ids, await caller.ask(token_ids, 4))
            num_served += 1

    async with Caller(cluster.decode.address) as caller, asyncio.TaskGroup() as load:
        for number in range(3):
            load.create_task(ask(caller, number))
        for index, node in enumerate(cluster.prefill_nodes):
            enough = num_served + 5
            await until(lambda enough=enough: num_served >= enough, "five more completed requests", within_s=60)
            await until(lambda node=node: is_at_work(node), "a request on the node", within_s=60)
            node.terminate()
            await until(lambda node=node: node.exit_code is not None, "the end of the node", within_s=60)
            assert node.exit_code == 0, node.log.tail()
            cluster.launch("prefill", index)
            await cluster.wait_joined()
        is_over.set()
    assert all(node.incarnation not in incarnations for node in cluster.prefill_nodes)


async def test_a_draining_decode_node_completes_its_requests_and_accepts_no_new_ones(
    cluster: LocalCluster, reference: Reference
) -> None:
    """After SIGTERM, requests in flight end with all tokens, new requests fail with UNAVAILABLE, and the exit code is 0."""
    decode = cluster.decode
    prompts = [prompt(LONG, 20), prompt(100, 21)]
    async with Caller(decode.address) as caller, Caller(decode.address) as late:
        await late.ask(())  # connect before the node stops accepting connections
        reference.tokens(prompts[1], 800)  # computed before, so that nobody waits for it
        flights = [caller.begin(prompts[0], 16), caller.begin(prompts[1], 800)]  # the node drains as long as they take
        await until(lambda: len(flights[1][0].tokens) > 3, "some tokens")
        decode.terminate()

        async def is_draining() -> bool:
            return (status := await status_of(decode)) is not None and status.draining

        await until(is_draining, "the node to drain")
        late_answer = await late.ask(prompt(5))
        assert (late_answer.code, late_answer.details) == (grpc.StatusCode.UNAVAILABLE, "the decode node is draining")
        for token_ids, (_, flight) in zip(prompts, flights, strict=True):
            reference.check(token_ids, await flight)
    await until(lambda: decode.exit_code is not None, "the end of the node", within_s=60)
    assert decode.exit_code == 0 and decode.ready_file is None, decode.log.tail()
    cluster.launch("decode")
    await cluster.wait_joined()
