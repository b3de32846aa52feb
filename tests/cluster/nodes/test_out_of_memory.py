"""Two tiers whose engines find no memory for some steps: those requests end, in one clear line, and the nodes go on."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from kvferry.local_cluster import ClusterNode, ClusterSpec, LocalCluster, TierSpec
from tests.cluster.calls import Caller, Reference, prompt, status_of, until, until_idle
from tests.cluster.conftest import HEARTBEAT_S, START_TIMEOUT_S, Start
from tests.cluster.nodes.hungry_engine import SEED_OF_DECODE, SEED_OF_PREFILL
from transfer.pb import kvferry_pb2 as pb

pytestmark = pytest.mark.timeout(180)

ENGINE = {"engine": "tests.cluster.nodes.hungry_engine:load_engine"}


async def figure(node: ClusterNode, metric: str) -> float:
    _, page = await node.http("/metrics")
    (line,) = [line for line in page.splitlines() if line.startswith(f"{metric}{{")]
    return float(line.rpartition(" ")[2])


@pytest.fixture(scope="module")
def hungry(start: Start, model: Path) -> Iterator[LocalCluster]:
    tier = TierSpec(model=model, pool_tokens=2048, settings=ENGINE)
    with start(ClusterSpec(prefill=tier, decode=tier, heartbeat_s=HEARTBEAT_S, start_timeout_s=START_TIMEOUT_S)) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def hungry_group(start: Start, model: Path) -> Iterator[LocalCluster]:
    tier = TierSpec(model=model, pool_tokens=2048)
    decode = TierSpec(model=model, tp_size=2, pool_tokens=2048, settings=ENGINE | {"restart.backoff_s": 0.1})
    with start(ClusterSpec(prefill=tier, decode=decode, heartbeat_s=HEARTBEAT_S, start_timeout_s=START_TIMEOUT_S)) as cluster:
        yield cluster


@pytest.mark.parametrize(
    ("role", "seed", "says"),
    [
        ("prefill", SEED_OF_PREFILL, ("a prefill step of 40 tokens: ", "; lower memory.static_fraction, limits.max_step_tokens")),
        ("decode", SEED_OF_DECODE, ("a decode step of 1 requests: ", "; lower memory.static_fraction or limits.max_running_")),
    ],
    ids=["prefill", "decode"],
)
async def test_a_step_without_memory_ends_its_requests_and_no_others(
    hungry: LocalCluster, reference: Reference, role: str, seed: int, says: tuple[str, str]
) -> None:
    node = hungry.prefill if role == "prefill" else hungry.decode
    async with Caller(hungry.decode.address) as caller:
        for attempt in range(2):
            answer = await caller.ask(prompt(40), 8, sampling=pb.SamplingParams(seed=seed))
            assert answer.code is grpc.StatusCode.RESOURCE_EXHAUSTED, answer.details
            for words in ("out of memory while computing ", f"{2**60} bytes asked for, the host has ", *says):
                assert words in answer.details
            assert await figure(node, "kvferry_out_of_memory_steps_total") == attempt + 1
        lines = [line for line in node.log.tail(200) if "out_of_memory" in line]
        assert len(lines) == 1 and "rank 0: out of memory while computing" in lines[0], "told of once"
        reference.check(prompt(40), await caller.ask(prompt(40), 8))
        await until_idle(*hungry.nodes)
    status = await status_of(node)
    assert status is not None and status.restarts == 0


async def test_a_full_pool_is_told_of_while_requests_wait_for_it(hungry: LocalCluster, reference: Reference) -> None:
    node, metric = hungry.decode, "kvferry_requests_waiting_for_pages"
    async with Caller(node.address) as caller:
        _, first = caller.begin(prompt(1000), 200)
        await until(lambda: figure_is(node, "kvferry_running_requests", 1), "the first request has room")
        _, second = caller.begin(prompt(900), 2)
        await until(lambda: figure_is(node, metric, 1), "the second request waits for pages")
        assert await figure(hungry.prefill, metric) == 0
        assert (await first).code is grpc.StatusCode.OK
        reference.check(prompt(900), await second)
        assert await figure(node, metric) == 0
    lines = [line for line in node.log.tail(200) if "kv_pool_full" in line]
    assert len(lines) == 1 and "raise memory.static_fraction or pool.num_pages, lower limits.max_running_requests" in lines[0]


async def figure_is(node: ClusterNode, metric: str, value: float) -> bool:
    return await figure(node, metric) == value


async def test_a_group_of_ranks_ends_with_the_same_line_and_starts_again(
    hungry_group: LocalCluster, reference: Reference
) -> None:
    """Its other ranks wait in a collective for the one that found no memory, so none of them can go on."""
    async with Caller(hungry_group.decode.address) as caller:
        answer = await caller.ask(prompt(40), 8, sampling=pb.SamplingParams(seed=SEED_OF_DECODE))
        assert answer.code is grpc.StatusCode.UNAVAILABLE
        assert "out of memory while computing a decode step of 1 requests: " in answer.details
        assert "; lower memory.static_fraction" in answer.details

        async def is_ready() -> bool:
            status = await status_of(hungry_group.decode)
            return status is not None and status.restarts == 1 and status.ready

        await until(is_ready, "the decode node has ranks again", within_s=60)
        reference.check(prompt(40), await caller.ask(prompt(40), 8))
