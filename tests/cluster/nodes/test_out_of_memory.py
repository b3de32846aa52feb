"""Two tiers whose engines find no memory for some steps, or whose pools are full: one clear line each, and the nodes continue."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from kvferry.local_cluster.cluster import ClusterNode, ClusterSpec, LocalCluster, TierSpec
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


@pytest.mark.parametrize(
    ("role", "seed", "says"),
    [
        (
            "prefill",
            SEED_OF_PREFILL,
            ("a prefill step of 40 tokens: ", "; lower memory.static_fraction (now 0.88), limits.max_step_tokens (now 512) or "),
        ),
        (
            "decode",
            SEED_OF_DECODE,
            ("a decode step of 1 requests: ", "; lower memory.static_fraction (now 0.88) or limits.max_running_requests (now "),
        ),
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


async def test_a_full_pool_is_logged_with_the_settings_to_change(hungry: LocalCluster) -> None:
    """The second request finds too few of the 128 pages: the first has room for its prompt and for all of its new tokens."""
    node = hungry.decode
    async with Caller(node.address) as caller:
        first, _ = caller.begin(prompt(40), 1500)
        await until(lambda: bool(first.tokens), "the first request runs")
        caller.begin(prompt(50), 1500)

        async def waits() -> bool:
            return await figure(node, "kvferry_requests_waiting_for_pages") == 1

        await until(waits, "the second request waits for pages")
    (line,) = [line for line in node.log.tail(200) if "kv_pool_full" in line]
    says = "raise memory.static_fraction (now 0.88) or pool.num_pages (now 128), or lower limits.max_running_requests (now "
    assert says in line
    await until_idle(*hungry.nodes)
