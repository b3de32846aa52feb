"""Tokens of a two-tier cluster match a single process, however the two tiers are sharded."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from kvferry.local_cluster.cluster import ClusterSpec, LocalCluster, TierSpec
from kvferry.local_cluster.node import ClusterNode
from tests.cluster.calls import Answer, Caller, Reference, prompt, status_of, until_idle
from tests.cluster.conftest import HEARTBEAT_S, POOL_TOKENS, START_TIMEOUT_S, Start
from transfer.chunk import split_into_chunks
from transfer.copy.kernel_choice import Kernels
from transfer.pb import kvferry_pb2 as pb
from transfer.registry.convert import chunk_plan_from_proto

pytestmark = pytest.mark.timeout(240)

LENGTHS = (1, 10, 127, 128, 129, 300, 600)
NUM_LAYERS = 8
NUM_KV_HEADS = 12
TOKEN_BYTES = NUM_LAYERS * NUM_KV_HEADS * 2 * 32 * 4  # K and V of 32 fp32 elements
RING_BYTES = 1 << 20
PIECE_BYTES = 128 * TOKEN_BYTES // 2 * 3 // NUM_LAYERS  # three layers of a chunk of 128 tokens, half of the heads


def _spec(model: Path, name: str) -> ClusterSpec:
    """Each cluster covers several differences between the tiers at once, because its start is expensive."""
    tiers = {
        "4 to 2, pages 16 to 32, NHD to HND": (
            TierSpec(model=model, tp_size=4, page_size=16, pool_tokens=POOL_TOKENS),
            TierSpec(model=model, tp_size=2, page_size=32, order="HND", pool_tokens=POOL_TOKENS),
        ),
        "2 to 4, pages 64 to 1, two layers at a time": (
            TierSpec(model=model, tp_size=2, page_size=64, pool_tokens=POOL_TOKENS, settings={"kernels": "torch"}),
            TierSpec(model=model, tp_size=4, page_size=1, pool_tokens=POOL_TOKENS),
        ),
        "1 to 2, pools too small for all, pieces of a size": (
            TierSpec(
                model=model, tp_size=1, page_size=16, order="HND", pool_tokens=704, settings={"chunk.piece_bytes": PIECE_BYTES}
            ),
            TierSpec(model=model, tp_size=2, page_size=16, pool_tokens=640),
        ),
        "3 to 2, NHD to HND, a ring of two chunks": (
            TierSpec(model=model, tp_size=3, page_size=8, pool_tokens=POOL_TOKENS),
            TierSpec(model=model, tp_size=2, page_size=24, order="HND", pool_tokens=POOL_TOKENS, settings={"kernels": "torch"}),
        ),
    }
    prefill, decode = tiers[name]
    is_tight = name.endswith("two chunks")
    return ClusterSpec(
        prefill=prefill,
        decode=decode,
        layers_per_group=2 if name.startswith("2 to 4") else None,
        chunk_tokens=32 if is_tight else None,
        ring_bytes=RING_BYTES if is_tight else None,
        staging_slots=2 if is_tight else None,
        heartbeat_s=HEARTBEAT_S,
        start_timeout_s=START_TIMEOUT_S,
    )


@pytest.fixture(
    scope="module",
    params=[
        "4 to 2, pages 16 to 32, NHD to HND",
        "2 to 4, pages 64 to 1, two layers at a time",
        "1 to 2, pools too small for all, pieces of a size",
        "3 to 2, NHD to HND, a ring of two chunks",
    ],
)
def cluster(request: pytest.FixtureRequest, model: Path, start: Start) -> Iterator[LocalCluster]:
    with start(_spec(model, request.param)) as cluster:
        yield cluster


async def test_tokens_are_those_of_one_process(cluster: LocalCluster, reference: Reference) -> None:
    prompts = [prompt(num_tokens, variant) for variant, num_tokens in enumerate(LENGTHS)]
    async with Caller(cluster.decode.address) as caller:
        answers = await asyncio.gather(*(caller.ask(token_ids, 20, timeout_s=120) for token_ids in prompts))
    plan = await chosen_plan(cluster)
    for token_ids, answer in zip(prompts, answers, strict=True):
        reference.check(token_ids, answer)
        check_stats(cluster, plan, len(token_ids), answer)
    await until_idle(cluster.prefill, cluster.decode)
    await check_ring(cluster)
    check_kernels(cluster)
    assert cluster.prefill.exit_code is None and cluster.decode.exit_code is None


def check_kernels(cluster: LocalCluster) -> None:
    """The log of each node names the kernels of its ranks."""
    for node in cluster.nodes:
        chosen = {line["kernels"] for line in node.log.events("kernels_chosen")}
        is_set = "kernels" in cluster.spec.tier(node.role).all_settings()
        assert chosen == {"torch" if is_set else Kernels.fastest(torch.device("cpu"))}


async def chosen_plan(cluster: LocalCluster) -> pb.ChunkPlanInfo:
    """How requests are cut, as both nodes show it; where nothing is set it depends on how fast this machine is."""
    plans = []
    for node in (cluster.prefill, cluster.decode):
        status = await status_of(node)
        assert status is not None and len(status.peers) == 1
        (peer,) = status.peers
        assert peer.largest_piece_bytes > 0 and f'kvferry_largest_piece_bytes{{role="{status.role}"}}' in await metrics(node)
        plans.append(peer.chunk_plan)
    assert plans[0] == plans[1] and plans[0].chunk_tokens == (cluster.spec.chunk_tokens or 128)
    if cluster.spec.layers_per_group is not None:
        assert plans[0].layers_per_group == cluster.spec.layers_per_group
    if "chunk.piece_bytes" in cluster.spec.prefill.all_settings():
        assert (plans[0].layers_per_group, peer.largest_piece_bytes) == (3, PIECE_BYTES)
    return plans[0]


async def metrics(node: ClusterNode) -> str:
    return (await node.http("/metrics"))[1]


def check_stats(cluster: LocalCluster, plan: pb.ChunkPlanInfo, num_tokens: int, answer: Answer) -> None:
    """Every byte of KV went over exactly once, in one write per chunk and route."""
    assert answer.done is not None
    stats = answer.done.stats
    assert (stats.bytes, stats.resends) == (num_tokens * TOKEN_BYTES, 0)
    chunks = split_into_chunks(chunk_plan_from_proto(plan), num_tokens=num_tokens, num_layers=NUM_LAYERS)
    routes = {(4, 2): 4, (2, 4): 4, (1, 2): 2, (3, 2): 4}[cluster.spec.prefill.tp_size, cluster.spec.decode.tp_size]
    assert stats.writes == len(chunks) * routes
    assert stats.writes_without_staging == num_tokens * NUM_LAYERS * 2 * routes
    assert 0 <= stats.exposed_s <= stats.transfer_s
    assert answer.done.prefill_node == cluster.prefill.address


async def check_ring(cluster: LocalCluster) -> None:
    status = await status_of(cluster.decode)
    assert status is not None
    for rank in status.ranks:
        assert rank.watermark_position >= sum(LENGTHS) * TOKEN_BYTES // cluster.spec.decode.tp_size
        if cluster.spec.ring_bytes is not None:
            assert rank.ring_peak_bytes >= rank.ring_capacity, "the ring was never full"
            assert rank.watermark_position > 3 * rank.ring_capacity, "the ring was not used round and round"
