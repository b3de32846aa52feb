"""How large pieces are made, from what the probe said."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from transfer.chunk import ChunkPlan, largest_wire_bytes, split_into_chunks
from transfer.instance import Instance, Link
from transfer.layout import DType, KVLayout, LayerKind, LayerSpec, Shard, routes
from transfer.piece_size import (
    CONTROL_COST_S,
    EFFICIENCY,
    MAX_PIECE_BYTES,
    MIN_PIECE_BYTES,
    largest_piece_bytes,
    piece_bytes_for,
    plan_with_pieces,
    token_layers_for,
)

LARGE_RING = 1 << 40


def link(latency_s: float, bandwidth: float) -> Link:
    return Link(prefill_rank=0, decode_rank=0, lane="x", latency_s=latency_s, bandwidth_bytes_per_s=bandwidth)


def instance(layout: KVLayout, shard: Shard) -> Instance:
    return Instance(incarnation=1, layout=layout, shard=shard, transport="ucx", digests=("d",), protocol_versions=(1,))


@given(latency_s=st.floats(0, 0.01), bandwidth=st.floats(1e6, 1e12), device_type=st.sampled_from(("cpu", "cuda")))
def test_a_piece_within_the_bounds_moves_payload_for_the_wanted_part_of_the_time(
    latency_s: float, bandwidth: float, device_type: str
) -> None:
    size = piece_bytes_for([link(latency_s, bandwidth)], device_type=device_type, ring_bytes=LARGE_RING)
    assert MIN_PIECE_BYTES <= size <= MAX_PIECE_BYTES[device_type]
    busy_s = size / bandwidth
    share = busy_s / (busy_s + latency_s + CONTROL_COST_S[device_type])
    if size < MAX_PIECE_BYTES[device_type]:
        assert share > EFFICIENCY - 1e-3
    if size > MIN_PIECE_BYTES:
        assert share < EFFICIENCY + 1e-3


@pytest.mark.parametrize(
    ("links", "device_type", "ring_bytes", "wanted"),
    [
        ((), "cpu", LARGE_RING, MIN_PIECE_BYTES),
        ([link(50e-6, 1e9)], "cpu", LARGE_RING, 7_650_000),  # 9 x 850 us x 1 GB/s
        ([link(50e-6, 1e9)], "cpu", 4_000_000, 1_000_000),
        ([link(50e-6, 1e9), link(50e-6, 1.5e9)], "cpu", LARGE_RING, 11_475_000),  # every link is used well
        ([link(0.0, 0.0)], "cpu", LARGE_RING, MIN_PIECE_BYTES),
        ([link(20e-6, 25e9)], "cuda", LARGE_RING, 94_500_000),
    ],
)
def test_sizes(links: list[Link], device_type: str, ring_bytes: int, wanted: int) -> None:
    assert piece_bytes_for(links, device_type=device_type, ring_bytes=ring_bytes) == pytest.approx(wanted, abs=1)


LLAMA_70B = KVLayout.uniform(num_layers=80, num_kv_heads=8, head_dim=128, dtype=DType.BFLOAT16)


@pytest.mark.parametrize(
    ("piece_bytes", "layers", "largest"),
    [
        # 128 tokens x 2 heads x 128 x K and V x 2 bytes are 128 KiB a layer on each of the four routes.
        (1 << 30, 0, 80 << 17),
        ((80 << 17) - 1, 40, 40 << 17),
        (4 << 20, 27, 27 << 17),  # three groups of 27, 27 and 26 layers rather than 32, 32 and 16
        (1, 1, 1 << 17),
    ],
)
def test_groups_are_as_few_as_the_size_allows_and_equally_large(piece_bytes: int, layers: int, largest: int) -> None:
    prefill, decode = instance(LLAMA_70B, Shard(tp_size=4)), instance(LLAMA_70B, Shard(tp_size=2, page_size=64))
    coarsest = ChunkPlan(chunk_tokens=128)
    plan = plan_with_pieces(coarsest, prefill, decode, piece_bytes=piece_bytes)
    assert plan == ChunkPlan(chunk_tokens=128, layers_per_group=layers)
    assert largest_piece_bytes(prefill, decode, plan) == largest


MIXED = KVLayout(
    layers=(
        *(LayerSpec(num_kv_heads=4, k_head_dim=8, v_head_dim=4),) * 3,
        LayerSpec(kind=LayerKind.SLIDING_WINDOW, num_kv_heads=2, k_head_dim=8, v_head_dim=8, window_tokens=9),
        LayerSpec(kind=LayerKind.MLA, num_kv_heads=1, k_head_dim=40, v_head_dim=0),
        LayerSpec(kind=LayerKind.RECURRENT_STATE, num_kv_heads=4, k_head_dim=100, v_head_dim=0),
        LayerSpec(kind=LayerKind.RECURRENT_STATE, num_kv_heads=4, k_head_dim=5, v_head_dim=0, dtype=DType.FLOAT32),
    ),
    dtype=DType.BFLOAT16,
)


@given(
    chunk_tokens=st.integers(1, 20),
    coarsest_layers=st.integers(0, 7),
    piece_bytes=st.integers(1, 20_000),
    prefill=st.builds(Shard, tp_size=st.integers(1, 6), pp_size=st.integers(1, 3)),
    decode=st.builds(Shard, tp_size=st.integers(1, 4), pp_size=st.integers(1, 3)),
)
def test_no_piece_is_larger_than_asked_unless_it_is_of_one_layer(
    chunk_tokens: int, coarsest_layers: int, piece_bytes: int, prefill: Shard, decode: Shard
) -> None:
    ours, theirs = instance(MIXED, prefill), instance(MIXED, decode)
    coarsest = ChunkPlan(chunk_tokens=chunk_tokens, layers_per_group=coarsest_layers)
    plan = plan_with_pieces(coarsest, ours, theirs, piece_bytes=piece_bytes)
    largest = largest_piece_bytes(ours, theirs, plan)
    assert largest <= piece_bytes or plan.layers_per_group == 1
    assert plan.chunk_tokens == chunk_tokens
    most = coarsest_layers or MIXED.num_layers
    assert all(len(chunk.layers) <= most for chunk in split_into_chunks(plan, num_tokens=30, num_layers=MIXED.num_layers))
    every = routes(MIXED, prefill, decode)
    assert largest == largest_wire_bytes(plan, MIXED, every, DType.BFLOAT16), "routes that are alike may be left out, no others"
    whole = largest_piece_bytes(ours, theirs, coarsest)
    if whole <= piece_bytes:
        assert (plan.layers_per_group or MIXED.num_layers) == min(most, MIXED.num_layers)


@given(
    chunk_tokens=st.integers(1, 40),
    piece_bytes=st.integers(1, 20_000),
    num_tokens=st.integers(1, 100),
    start=st.integers(0, 99),
    prefill=st.builds(Shard, tp_size=st.integers(1, 6), pp_size=st.integers(1, 3)),
    decode=st.builds(Shard, tp_size=st.integers(1, 4), pp_size=st.integers(1, 3)),
)
def test_with_more_layers_in_short_chunks_no_piece_is_larger_and_no_request_has_more_chunks(
    chunk_tokens: int, piece_bytes: int, num_tokens: int, start: int, prefill: Shard, decode: Shard
) -> None:
    layout = KVLayout(layers=MIXED.layers[:-2], dtype=MIXED.dtype)  # without states
    ours, theirs = instance(layout, prefill), instance(layout, decode)
    plan = plan_with_pieces(ChunkPlan(chunk_tokens=chunk_tokens), ours, theirs, piece_bytes=piece_bytes)
    scaled = replace(plan, token_layers=token_layers_for(ours, theirs, piece_bytes=piece_bytes))
    assert largest_piece_bytes(ours, theirs, scaled) <= max(piece_bytes, largest_piece_bytes(ours, theirs, plan))
    before, after = (
        len(split_into_chunks(one, num_tokens=num_tokens, num_layers=layout.num_layers, start_token=min(start, num_tokens - 1)))
        for one in (plan, scaled)
    )
    assert after <= before
