"""Geometry: exact cover of every cut by every cut, wire layout, and what is refused."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import replace
from itertools import pairwise, product
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.adapters.vllm_slots import kept_tokens
from transfer.errors import LayoutError
from transfer.layout import (
    DType,
    HeadSlice,
    KVLayout,
    LayerKind,
    LayerSpec,
    Range,
    Route,
    Shard,
    TokenOrder,
    TokenShard,
    dcp_differences,
    payload_rates,
    routes,
    wire_buffers,
    wire_bytes,
    wire_dtype,
)

MHA = LayerSpec(num_kv_heads=8, k_head_dim=128, v_head_dim=128)
MLA = LayerSpec(kind=LayerKind.MLA, num_kv_heads=1, k_head_dim=576, v_head_dim=0)
WINDOW = LayerSpec(kind=LayerKind.SLIDING_WINDOW, num_kv_heads=8, k_head_dim=64, v_head_dim=32, window_tokens=10)
CHUNK = replace(WINDOW, kind=LayerKind.CHUNKED_LOCAL)
STATE = LayerSpec(kind=LayerKind.RECURRENT_STATE, num_kv_heads=4, k_head_dim=1000, v_head_dim=0)
STATE32 = replace(STATE, dtype=DType.FLOAT32)
ROWS = replace(MLA, k_head_dim=656, dtype=DType.INT8)
INDEXER = LayerSpec(num_kv_heads=1, k_head_dim=128, v_head_dim=4, dtype=DType.INT8)


@st.composite
def layouts(draw: st.DrawFn) -> KVLayout:
    mha = st.builds(
        LayerSpec, num_kv_heads=st.sampled_from((1, 2, 3, 4, 5, 8, 12, 16)), k_head_dim=st.just(4), v_head_dim=st.just(2)
    )
    own = st.builds(
        LayerSpec,
        kind=st.just(LayerKind.RECURRENT_STATE),
        num_kv_heads=st.sampled_from((1, 2, 3, 4, 16)),
        k_head_dim=st.integers(1, 9),
        v_head_dim=st.just(0),
        dtype=st.sampled_from(DType),
    )
    others = st.sampled_from((MHA, MLA, WINDOW, CHUNK, STATE, STATE32, ROWS, INDEXER, replace(WINDOW, dtype=DType.INT8)))
    return KVLayout(
        layers=tuple(draw(st.lists(st.one_of(mha, own, others), min_size=1, max_size=9))),
        dtype=draw(st.sampled_from(DType)),
    )


@st.composite
def shards(draw: st.DrawFn, layout: KVLayout, max_tp: int = 16) -> Shard:
    pp_size = draw(st.integers(1, min(4, layout.num_layers)))
    stages = None
    if draw(st.booleans()):
        cuts = sorted(draw(st.lists(st.integers(0, layout.num_layers), min_size=pp_size - 1, max_size=pp_size - 1)))
        edges = [0, *cuts, layout.num_layers]
        stages = tuple(end - begin for begin, end in pairwise(edges))
    return Shard(tp_size=draw(st.integers(1, max_tp)), pp_size=pp_size, stage_layers=stages)


def global_heads(layout: KVLayout, shard: Shard, layer: int) -> Range:
    return shard.heads(layout.layers[layer].num_kv_heads)


def assert_exact_cover(layout: KVLayout, prefill: Shard, decode: Shard) -> None:
    """Every (layer, local head) of every decode rank is written once, by a rank that holds that global head of that layer."""
    written: Counter[tuple[int, int, int]] = Counter()
    for index, route in enumerate(routes(layout, prefill, decode)):
        assert route.index == index and len(route.layers)
        source, target = prefill.at(route.prefill_rank), decode.at(route.decode_rank)
        travelling = route.layers_in(layout, route.layers)
        assert len({layout.layers[layer].num_kv_heads for layer in travelling}) == 1
        assert {route.layers.begin, route.layers.end - 1} <= set(travelling), "the span is as narrow as it can be"
        for layer in travelling:
            assert layer in source.layers(layout) and layer in target.layers(layout)
            held, wanted = global_heads(layout, source, layer), global_heads(layout, target, layer)
            local, remote = route.heads.source, route.heads.target
            for sent, head in zip(range(local.begin, local.end), range(remote.begin, remote.end), strict=True):
                source_head, target_head = held.begin + sent, wanted.begin + head
                assert source_head == target_head and source_head in held and target_head in wanted
                written[route.decode_rank, layer, head] += 1
    expected = {
        (rank, layer, head): 1
        for rank in range(decode.num_ranks)
        for layer in range(decode.at(rank).layers(layout).begin, decode.at(rank).layers(layout).end)
        for head in range(len(global_heads(layout, decode.at(rank), layer)))
    }
    assert written == expected


@pytest.mark.parametrize("num_heads", [1, 3, 8, 12])
def test_exact_cover_of_all_tp_pairs(num_heads: int) -> None:
    layout = KVLayout.uniform(num_layers=1, num_kv_heads=num_heads, head_dim=4, dtype=DType.BFLOAT16)
    for prefill_tp in range(1, 17):
        for decode_tp in range(1, 17):
            assert_exact_cover(layout, Shard(tp_size=prefill_tp), Shard(tp_size=decode_tp))


@given(data=st.data(), layout=layouts())
def test_exact_cover_of_mixed_layers_and_stages(data: st.DataObject, layout: KVLayout) -> None:
    prefill, decode = data.draw(shards(layout)), data.draw(shards(layout))
    assert_exact_cover(layout, prefill, decode)
    # Whose view of the cut is handed in does not matter.
    any_prefill = prefill.at(data.draw(st.integers(0, prefill.num_ranks - 1)))
    any_decode = decode.at(data.draw(st.integers(0, decode.num_ranks - 1)))
    assert routes(layout, any_prefill, any_decode) == routes(layout, prefill, decode)


@given(num_heads=st.integers(1, 16), tp_size=st.integers(1, 32))
def test_ranks_hold_every_head_and_consecutive_ranks_share(num_heads: int, tp_size: int) -> None:
    held = [Shard(tp_size=tp_size, tp_rank=rank).heads(num_heads) for rank in range(tp_size)]
    assert {head for span in held for head in range(span.begin, span.end)} == set(range(num_heads))
    assert all(left.begin <= right.begin for left, right in pairwise(held))
    sizes = {len(span) for span in held}
    assert max(sizes) - min(sizes) <= 1
    if tp_size <= num_heads:
        assert sum(len(span) for span in held) == num_heads
    else:
        shares = Counter(span.begin for span in held)
        assert sizes == {1} and max(shares.values()) - min(shares.values()) <= 1


@pytest.mark.parametrize("num_heads", [1, 3, 8])
def test_replicas_share_the_load_within_one(num_heads: int) -> None:
    layout = KVLayout.uniform(num_layers=1, num_kv_heads=num_heads, head_dim=4, dtype=DType.BFLOAT16)
    for prefill_tp in range(num_heads, 17):
        for decode_tp in range(1, 17):
            prefill, decode = Shard(tp_size=prefill_tp), Shard(tp_size=decode_tp)
            found = routes(layout, prefill, decode)
            for head in range(num_heads):
                replicas = [rank for rank in range(prefill_tp) if head in prefill.at(rank).heads(num_heads)]
                load = Counter({rank: 0 for rank in replicas})
                for route in found:
                    if head in prefill.at(route.prefill_rank).heads(num_heads) and sends(route, prefill, num_heads, head):
                        load[route.prefill_rank] += 1
                assert max(load.values()) - min(load.values()) <= 1, (prefill_tp, decode_tp, head, load)


def sends(route: Route, prefill: Shard, num_heads: int, head: int) -> bool:
    begin = prefill.at(route.prefill_rank).heads(num_heads).begin + route.heads.source_start
    return begin <= head < begin + route.heads.count


@pytest.mark.parametrize("num_heads", [1, 4, 8])
def test_equal_cuts_are_joined_rank_by_rank(num_heads: int) -> None:
    layout = KVLayout.uniform(num_layers=2, num_kv_heads=num_heads, head_dim=4, dtype=DType.BFLOAT16)
    for tp_size in range(1, 17):
        shard = Shard(tp_size=tp_size, pp_size=2)
        assert [(route.prefill_rank, route.decode_rank) for route in routes(layout, shard, shard)] == [
            (rank, rank) for rank in range(2 * tp_size)
        ]


def test_the_main_case_by_hand() -> None:
    """12 heads, 4 -> 2: two prefill ranks of 3 heads fill each decode rank of 6."""
    layout = KVLayout.uniform(num_layers=8, num_kv_heads=12, head_dim=32, dtype=DType.FLOAT32)
    layers = Range(begin=0, end=8)
    assert routes(layout, Shard(tp_size=4), Shard(tp_size=2)) == tuple(
        Route(
            index=index,
            prefill_rank=index,
            decode_rank=index // 2,
            layers=layers,
            heads=HeadSlice(source_start=0, target_start=3 * (index % 2), count=3),
        )
        for index in range(4)
    )


@st.composite
def token_shards(draw: st.DrawFn, num_heads: int) -> Shard:
    dcp_size = draw(st.sampled_from((1, 2, 3, 4, 6)))
    return Shard(tp_size=dcp_size * num_heads * draw(st.integers(1, 2)), dcp_size=dcp_size)


@settings(max_examples=60)
@given(data=st.data(), num_heads=st.integers(1, 3), interleave=st.integers(1, 6), num_blocks=st.integers(1, 3))
def test_every_token_comes_from_a_rank_on_which_vllm_keeps_it(
    data: st.DataObject, num_heads: int, interleave: int, num_blocks: int
) -> None:
    layout = KVLayout.uniform(num_layers=1, num_kv_heads=num_heads, head_dim=4, dtype=DType.BFLOAT16)
    prefill, decode = (
        replace(data.draw(token_shards(num_heads)), interleave_tokens=interleave, page_size=interleave) for _ in range(2)
    )
    if dcp_differences(prefill, decode):
        return
    num_tokens, block_size = data.draw(st.integers(1, 80)), num_blocks * interleave
    written: Counter[tuple[int, int]] = Counter()
    for route in routes(layout, prefill, decode):
        source, target = prefill.at(route.prefill_rank), decode.at(route.decode_rank)
        sent, kept = (kept_tokens(one, num_tokens, block_size) for one in (source, target))
        assert (
            source.heads(num_heads).begin + route.heads.source_start == target.heads(num_heads).begin + route.heads.target_start
        )
        begin = data.draw(st.integers(0, num_tokens))
        numbers = [route.own_tokens(Range(begin=first, end=end)) for first, end in ((0, begin), (begin, num_tokens))]
        assert numbers[0].end == numbers[1].begin and numbers[1].end == route.own_count(num_tokens)
        for number in range(route.own_count(num_tokens)):
            token = number if route.token_shard is None else route.token_shard.token(number)
            assert token in sent and token in kept
            assert route.own_count(token) == number and route.own_count(token + 1) == number + 1
            for one, places in ((source, sent), (target, kept)):
                if route.token_shard is not None and one.dcp_size == route.token_shard.size:
                    assert places[token] == number  # the page table is used as it is
            for head in range(route.heads.target.begin, route.heads.target.end):
                written[route.decode_rank * 16 + head, token] += 1
    assert written == {
        (rank * 16 + head, token): 1
        for rank in range(decode.num_ranks)
        for head in range(len(decode.at(rank).heads(num_heads)))
        for token in kept_tokens(decode.at(rank), num_tokens, block_size)
    }


@pytest.mark.parametrize("sizes", [(1, 2), (2, 1), (2, 2), (2, 4)])
def test_replicas_of_divided_tokens_share_the_load_within_one(sizes: tuple[int, int]) -> None:
    layout = KVLayout.uniform(num_layers=1, num_kv_heads=2, head_dim=4, dtype=DType.BFLOAT16)
    for prefill_tp, decode_tp in product((8, 16, 24), repeat=2):
        prefill, decode = (Shard(tp_size=tp, dcp_size=size) for tp, size in zip((prefill_tp, decode_tp), sizes, strict=True))
        loads: dict[tuple[int, int, int], Counter[int]] = {}
        for route in routes(layout, prefill, decode):
            sent, index = prefill.at(route.prefill_rank), 0 if route.token_shard is None else route.token_shard.index
            head = sent.heads(2).begin
            replicas = [rank for rank in range(prefill_tp) if prefill.at(rank).heads(2).begin == head]
            same = [rank for rank in replicas if prefill.at(rank).dcp_rank == sent.dcp_rank]
            loads.setdefault((head, sent.dcp_rank, index), Counter(dict.fromkeys(same, 0)))[route.prefill_rank] += 1
        assert all(max(load.values()) - min(load.values()) <= 1 for load in loads.values()), (prefill_tp, decode_tp, loads)


def test_equal_dcp_sizes_are_joined_rank_by_rank() -> None:
    layout = KVLayout.uniform(num_layers=2, num_kv_heads=2, head_dim=4, dtype=DType.BFLOAT16)
    shard = Shard(tp_size=8, pp_size=2, dcp_size=2, interleave_tokens=16)
    found = routes(layout, shard, shard)
    assert [(route.prefill_rank, route.decode_rank) for route in found] == [(rank, rank) for rank in range(16)]
    assert [route.token_shard for route in found] == [
        TokenShard(size=2, index=rank % 2, interleave_tokens=16) for rank in range(16)
    ]


@pytest.mark.parametrize(
    ("prefill", "decode", "named"),
    [
        (Shard(), Shard(tp_size=2, dcp_size=2, interleave_tokens=16), []),
        (Shard(tp_size=4, dcp_size=4, interleave_tokens=32), Shard(tp_size=4, dcp_size=2, interleave_tokens=32), []),
        (Shard(tp_size=2, dcp_size=2), Shard(tp_size=4, dcp_size=2), []),
        (
            Shard(tp_size=3, dcp_size=3, interleave_tokens=16),
            Shard(tp_size=2, dcp_size=2, interleave_tokens=16),
            ["dcp_size: 3 != 2 (one must divide the other)"],
        ),
        (
            Shard(tp_size=2, dcp_size=2, interleave_tokens=16),
            Shard(tp_size=2, dcp_size=2, interleave_tokens=32),
            ["interleave_tokens: 16 != 32 (DCP on both sides)"],
        ),
        (
            Shard(page_size=16),
            Shard(tp_size=2, dcp_size=2, interleave_tokens=8),
            ["dcp_size: 1 != 2 (the interleave of 8 tokens must then be a multiple of the other side's page_size, 16)"],
        ),
    ],
)
def test_dcp_sizes_that_fit(prefill: Shard, decode: Shard, named: list[str]) -> None:
    assert dcp_differences(prefill, decode) == named


@pytest.mark.parametrize(
    ("tp_size", "layers", "match"),
    [
        (8, (MLA, MHA), "dcp_size is 2; it can be at most 1: layer 1 has 8 KV heads on 8 TP ranks"),
        (16, (MLA, WINDOW), "dcp_size is 2; it must be 1, because layer 1 is of kind sliding_window"),
        (16, (STATE,), "dcp_size is 2; it must be 1, because layer 0 is of kind recurrent_state"),
    ],
)
def test_layers_whose_tokens_cannot_be_divided(tp_size: int, layers: tuple[LayerSpec, ...], match: str) -> None:
    layout = KVLayout(layers=layers, dtype=DType.FLOAT16)
    Shard(tp_size=tp_size).check_dcp(layout)
    with pytest.raises(LayoutError, match=match):
        Shard(tp_size=tp_size, dcp_size=2).check_dcp(layout)


def test_layers_whose_tokens_can_be_divided() -> None:
    Shard(tp_size=16, dcp_size=2).check_dcp(KVLayout(layers=(MHA, MLA), dtype=DType.FLOAT16))


ROUTE = Route(
    index=0,
    prefill_rank=0,
    decode_rank=0,
    layers=Range(begin=1, end=4),
    heads=HeadSlice(source_start=0, target_start=0, count=4),
)


@given(data=st.data(), layout=layouts(), num_tokens=st.integers(1, 60))
def test_wire_buffers_are_contiguous_and_exact(data: st.DataObject, layout: KVLayout, num_tokens: int) -> None:
    begin = data.draw(st.integers(0, num_tokens - 1))
    tokens = Range(begin=begin, end=data.draw(st.integers(begin + 1, num_tokens)))
    first = data.draw(st.integers(0, layout.num_layers))
    layers = Range(begin=first, end=data.draw(st.integers(first, layout.num_layers)))
    dtype = data.draw(st.sampled_from(DType))
    for route in routes(layout, Shard(tp_size=2, pp_size=min(2, layout.num_layers)), Shard(tp_size=3)):
        arguments: dict[str, Any] = {"tokens": tokens, "layers": layers, "num_tokens": num_tokens, "dtype": dtype}
        buffers = wire_buffers(layout, route, **arguments)
        position = 0
        for buffer in buffers:
            spec = layout.layers[buffer.layer]
            element = (spec.dtype or dtype).num_bytes
            assert buffer.layer in route.layers and buffer.layer in layers and len(buffer.tokens)
            assert buffer.offset_bytes % element == 0 and 0 <= buffer.offset_bytes - position < element
            assert buffer.row_bytes == route.heads.count * (spec.v_head_dim if buffer.is_v else spec.k_head_dim) * element
            position = buffer.offset_bytes + buffer.num_bytes
        assert position == wire_bytes(layout, route, **arguments)
        num_slices = payload_rates(layout, route, layers, dtype).num_slices(tokens, num_tokens)
        assert sum(len(buffer.tokens) for buffer in buffers) == num_slices
        places = [(buffer.layer, buffer.is_v) for buffer in buffers]
        assert places == sorted(set(places))


def test_a_layer_with_a_dtype_of_its_own_begins_on_its_elements() -> None:
    """Three bytes of a latent, then a state in float32, then latents again: nothing is rounded up but where it must be."""
    latent = LayerSpec(kind=LayerKind.MLA, num_kv_heads=1, k_head_dim=3, v_head_dim=0)
    state = LayerSpec(kind=LayerKind.RECURRENT_STATE, num_kv_heads=1, k_head_dim=5, v_head_dim=0, dtype=DType.FLOAT32)
    layout = KVLayout(layers=(latent, state, latent, latent, state), dtype=DType.BFLOAT16)
    whole = Range(begin=0, end=5)
    route = replace(ROUTE, layers=whole, heads=HeadSlice(source_start=0, target_start=0, count=1))
    for dtype, offsets, end in (
        (DType.FLOAT8_E4M3, [0, 4, 24, 27, 32], 52),
        (DType.BFLOAT16, [0, 8, 28, 34, 40], 60),
        (DType.FLOAT32, [0, 12, 32, 44, 56], 76),
    ):
        arguments: dict[str, Any] = {"tokens": Range(begin=0, end=1), "layers": whole, "num_tokens": 1, "dtype": dtype}
        buffers = wire_buffers(layout, route, **arguments)
        assert [buffer.offset_bytes for buffer in buffers] == offsets
        assert [buffer.row_bytes for buffer in buffers if buffer.layer in (1, 4)] == [20, 20], "float32, whatever the wire is"
        assert wire_bytes(layout, route, **arguments) == end


def test_sizes_of_layouts_that_differ_only_within_are_told_apart() -> None:
    """Sizes are remembered by layout, whose hash looks only at its ends."""
    wide = replace(MHA, k_head_dim=2 * MHA.k_head_dim)
    layouts_ = [KVLayout(layers=(MHA, spec, MHA), dtype=DType.BFLOAT16) for spec in (MHA, wide, replace(MHA))]
    assert len({hash(layout) for layout in layouts_}) == 1
    whole = Range(begin=0, end=3)
    arguments: dict[str, Any] = {"tokens": Range(begin=0, end=8), "layers": whole, "num_tokens": 8, "dtype": DType.BFLOAT16}
    plain, other, again = [wire_bytes(layout, replace(ROUTE, layers=whole), **arguments) for layout in layouts_]
    assert other - plain == 8 * ROUTE.heads.count * MHA.k_head_dim * 2
    assert again == plain


def test_a_rank_keeps_a_state_in_the_dtype_of_the_model() -> None:
    layout = KVLayout(layers=(MHA, STATE32, STATE), dtype=DType.BFLOAT16)
    for shard, pool in ((Shard(), DType.BFLOAT16), (Shard(dtype=DType.FLOAT8_E4M3), DType.FLOAT8_E4M3)):
        assert [shard.layer_dtype(layout, layer) for layer in range(3)] == [pool, DType.FLOAT32, pool]
    assert wire_dtype(layout, Shard(), Shard(dtype=DType.FLOAT8_E4M3)) is DType.FLOAT8_E4M3, "that of the other layers"


def test_whole_buffers_travel_in_layer_order_k_before_v() -> None:
    layout = KVLayout(layers=(MHA, MHA, MLA, MHA, MHA), dtype=DType.BFLOAT16)
    buffers = wire_buffers(
        layout, ROUTE, tokens=Range(begin=3, end=8), layers=Range(begin=0, end=5), num_tokens=9, dtype=DType.INT8
    )
    assert [(buffer.layer, buffer.is_v, buffer.row_bytes, buffer.offset_bytes) for buffer in buffers] == [
        (1, False, 512, 0),
        (1, True, 512, 2560),
        (2, False, 2304, 5120),
        (3, False, 512, 16640),
        (3, True, 512, 19200),
    ]
    assert (
        wire_buffers(layout, ROUTE, tokens=Range(begin=3, end=8), layers=Range(begin=0, end=1), num_tokens=9, dtype=DType.INT8)
        == ()
    )


@pytest.mark.parametrize(
    ("tokens", "travels"),
    [((0, 8), None), ((8, 16), (15, 16)), ((16, 25), (16, 25)), ((0, 25), (15, 25)), ((0, 15), None), ((0, 7), (0, 7))],
)
def test_a_sliding_window_moves_only_what_can_still_be_read(tokens: tuple[int, int], travels: tuple[int, int] | None) -> None:
    num_tokens = 7 if tokens[1] == 7 else 25  # a prompt shorter than the window moves whole
    first = Range(begin=0, end=1)
    layout, route, span = (
        KVLayout(layers=(WINDOW,), dtype=DType.INT8),
        replace(ROUTE, layers=first),
        Range(begin=tokens[0], end=tokens[1]),
    )
    buffers = wire_buffers(layout, route, tokens=span, layers=first, num_tokens=num_tokens, dtype=DType.INT8)
    expected = [] if travels is None else [Range(begin=travels[0], end=travels[1])] * 2
    assert [buffer.tokens for buffer in buffers] == expected


@pytest.mark.parametrize(("num_tokens", "first"), [(1, 0), (9, 0), (10, 0), (11, 10), (20, 10), (25, 20)])
def test_of_chunked_local_attention_the_chunk_of_the_last_token_moves(num_tokens: int, first: int) -> None:
    """Also if the chunk ends with the prompt: decode computes the last token again, which reads its chunk."""
    layer, every = Range(begin=0, end=1), Range(begin=0, end=num_tokens)
    layout, route = KVLayout(layers=(CHUNK,), dtype=DType.INT8), replace(ROUTE, layers=layer)
    buffers = wire_buffers(layout, route, tokens=every, layers=layer, num_tokens=num_tokens, dtype=DType.INT8)
    assert [buffer.tokens for buffer in buffers] == [Range(begin=first, end=num_tokens)] * 2
    assert payload_rates(layout, route, layer, DType.INT8).first_token(num_tokens) == first


@pytest.mark.parametrize("spec", [WINDOW, CHUNK], ids=["window", "chunk"])
@pytest.mark.parametrize("first", range(1, 25))
def test_the_shortest_prompt_that_leaves_tokens_out(spec: LayerSpec, first: int) -> None:
    lengths = [num_tokens for num_tokens in range(1, 50) if spec.first_travelling_token(num_tokens) >= first]
    assert spec.shortest_prompt(first) == min(lengths)


@given(cuts=st.lists(st.integers(1, 39), max_size=6, unique=True))
def test_a_recurrent_state_travels_once(cuts: list[int]) -> None:
    layout = KVLayout(layers=(STATE,), dtype=DType.FLOAT32)
    edges = [0, *sorted(cuts), 40]
    sent = [
        buffer
        for begin, end in pairwise(edges)
        for buffer in wire_buffers(
            layout,
            replace(ROUTE, layers=Range(begin=0, end=1)),
            tokens=Range(begin=begin, end=end),
            layers=Range(begin=0, end=1),
            num_tokens=40,
            dtype=DType.FLOAT32,
        )
    ]
    assert [(buffer.tokens, buffer.num_bytes) for buffer in sent] == [(Range(begin=0, end=1), 4 * 1000 * 4)]


GATED_DELTA = LayerSpec(kind=LayerKind.RECURRENT_STATE, num_kv_heads=16, k_head_dim=33792, v_head_dim=0)
SMALL = LayerSpec(num_kv_heads=2, k_head_dim=256, v_head_dim=256)


@pytest.mark.parametrize(
    ("layout", "fingerprint"),
    [
        (KVLayout(layers=(MHA,) * 80, dtype=DType.BFLOAT16), "2c64c3e1c19c272b"),
        (KVLayout(layers=(MHA, WINDOW, WINDOW, MLA, STATE), dtype=DType.FLOAT8_E4M3), "4e2d4dcc4f92abec"),
        (KVLayout(layers=(*(GATED_DELTA,) * 3, SMALL) * 12, dtype=DType.BFLOAT16), "29077ae868110ffd"),
        (
            KVLayout(
                layers=(
                    SMALL,
                    MLA,
                    GATED_DELTA,
                    LayerSpec(kind=LayerKind.SLIDING_WINDOW, num_kv_heads=4, k_head_dim=8, v_head_dim=6, window_tokens=9),
                ),
                dtype=DType.INT8,
            ),
            "fd215f302b04609e",
        ),
        (KVLayout(layers=(*(CHUNK,) * 3, MHA), dtype=DType.BFLOAT16), "53dfb11a0d4923ea"),
    ],
)
def test_fingerprints_never_change(layout: KVLayout, fingerprint: str) -> None:
    """A changed value would make two versions of kvferry refuse each other."""
    assert layout.fingerprint() == fingerprint
    assert not any("dtype=" in value for value in layout.fields().values())


def test_a_dtype_of_a_layers_own_is_part_of_the_fingerprint() -> None:
    ours = KVLayout(layers=(GATED_DELTA, SMALL), dtype=DType.BFLOAT16)
    theirs = KVLayout(layers=(replace(GATED_DELTA, dtype=DType.FLOAT32), SMALL), dtype=DType.BFLOAT16)
    assert theirs.fingerprint() == "01b5751e9aa09bb7"
    text = "recurrent_state kv_heads=16 k_dim=33792 v_dim=0 window=0"
    assert ours.differences(theirs) == [f"layers[0:1]: {text} != {text} dtype=float32"]


@given(left=layouts(), right=layouts())
def test_fingerprints_differ_exactly_where_layouts_do(left: KVLayout, right: KVLayout) -> None:
    assert (left.fingerprint() == right.fingerprint()) is (left == right) is (not left.differences(right))
    assert KVLayout(layers=left.layers, dtype=left.dtype).fingerprint() == left.fingerprint()


def test_differences_name_both_values() -> None:
    ours = KVLayout.uniform(num_layers=4, num_kv_heads=8, head_dim=128, dtype=DType.BFLOAT16)
    theirs = KVLayout.uniform(num_layers=4, num_kv_heads=4, head_dim=128, dtype=DType.FLOAT16)
    assert ours.differences(theirs) == [
        "dtype: bfloat16 != float16",
        "layers[0:4]: attention kv_heads=8 k_dim=128 v_dim=128 window=0 != attention kv_heads=4 k_dim=128 v_dim=128 window=0",
    ]
    longer = KVLayout.uniform(num_layers=5, num_kv_heads=8, head_dim=128, dtype=DType.BFLOAT16)
    assert ours.differences(longer)[-1] == "num_layers: 4 != 5"


@pytest.mark.parametrize(
    ("prefill", "decode", "expected"),
    [
        (None, None, DType.BFLOAT16),
        (DType.FLOAT32, DType.FLOAT16, DType.FLOAT16),
        (DType.FLOAT16, DType.FLOAT32, DType.FLOAT16),
        (DType.FLOAT16, DType.BFLOAT16, DType.FLOAT16),
        (None, DType.FLOAT8_E4M3, DType.FLOAT8_E4M3),
        (DType.INT8, DType.INT8, DType.INT8),
    ],
)
def test_the_wire_has_the_narrower_dtype(prefill: DType | None, decode: DType | None, expected: DType) -> None:
    layout = KVLayout(layers=(MHA,), dtype=DType.BFLOAT16)
    assert wire_dtype(layout, Shard(dtype=prefill), Shard(dtype=decode)) is expected
    with pytest.raises(LayoutError, match="dtype int8 -> bfloat16"):
        wire_dtype(layout, Shard(dtype=DType.INT8), Shard())


def test_spans() -> None:
    span = Range(begin=2, end=5)
    assert len(span) == 3 and 2 in span and 5 not in span
    assert span.intersect(Range(begin=4, end=9)) == Range(begin=4, end=5)
    assert span.intersect(Range(begin=7, end=9)) == Range(begin=7, end=7)
    assert span.intersect(Range(begin=0, end=1)) == Range(begin=2, end=2)
    for begin, end in ((-1, 2), (3, 2)):
        with pytest.raises(LayoutError, match=rf"\[{begin}, {end}\)"):
            Range(begin=begin, end=end)


def test_stages_cover_the_layers_and_the_first_take_the_rest() -> None:
    layout = KVLayout(layers=(MHA,) * 10, dtype=DType.BFLOAT16)
    even = [Shard(pp_size=4, pp_rank=rank).layers(layout) for rank in range(4)]
    assert [(span.begin, span.end) for span in even] == [(0, 3), (3, 6), (6, 8), (8, 10)]
    given = [Shard(pp_size=3, pp_rank=rank, stage_layers=(1, 0, 9)).layers(layout) for rank in range(3)]
    assert [(span.begin, span.end) for span in given] == [(0, 1), (1, 1), (1, 10)]


def test_ranks_are_stage_major() -> None:
    shard = Shard(tp_size=3, pp_size=2, page_size=7, order=TokenOrder.HND)
    assert shard.num_ranks == 6
    assert [shard.at(rank).rank for rank in range(6)] == list(range(6))
    assert shard.at(4) == replace(shard, tp_rank=1, pp_rank=1)


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: LayerSpec(num_kv_heads=0, k_head_dim=1, v_head_dim=1), "num_kv_heads is 0"),
        (lambda: LayerSpec(num_kv_heads=1, k_head_dim=0, v_head_dim=1), "head dims are K 0, V 1"),
        (lambda: replace(MLA, num_kv_heads=2), "an MLA layer has one latent"),
        (lambda: replace(STATE, v_head_dim=2), "one state buffer; got V dim 2"),
        (lambda: replace(MHA, dtype=DType.FLOAT32), "dtype of a layer of kind attention is float32; it must be None or int8"),
        (lambda: replace(ROWS, k_head_dim=658), "rows of a layer of kind mla have 658 and 0 bytes; they must be multiples of 4"),
        (lambda: replace(INDEXER, v_head_dim=6), "rows of a layer of kind attention have 128 and 6 bytes"),
        (lambda: replace(WINDOW, window_tokens=0), "window_tokens is 0 for kind sliding_window"),
        (lambda: replace(CHUNK, window_tokens=0), "window_tokens is 0 for kind chunked_local"),
        (lambda: replace(MHA, window_tokens=4), "window_tokens is 4 for kind attention"),
        (lambda: KVLayout(layers=(), dtype=DType.INT8), "layers is empty"),
        (lambda: Shard(tp_size=0), "tp_size is 0"),
        (lambda: Shard(tp_size=513, pp_size=2), "tp_size is 513, pp_size 2; an instance has at most 1024 ranks"),
        (lambda: Shard(pp_size=5).layers(KVLayout(layers=(MHA,) * 4, dtype=DType.INT8)), "pp_size is 5; a model of 4 layers"),
        (lambda: KVLayout(layers=(MHA,) * 4097, dtype=DType.INT8), "layers has 4097 entries"),
        (lambda: KVLayout.uniform(num_layers=10**9, num_kv_heads=1, head_dim=1, dtype=DType.INT8), "num_layers is 1000000000"),
        (lambda: Shard(tp_size=2, tp_rank=2), "tp_rank is 2; with tp_size 2"),
        (lambda: Shard(page_size=0), "page_size is 0"),
        (lambda: Shard(tp_size=4, dcp_size=3), "dcp_size is 3; it must divide tp_size, 4"),
        (lambda: Shard(dcp_size=0), "dcp_size is 0"),
        (lambda: Shard(interleave_tokens=0), "interleave_tokens is 0"),
        (lambda: Shard(pp_size=2, stage_layers=(1,)), "stage_layers has 1 entries; pp_size is 2"),
        (lambda: Shard(pp_size=2, stage_layers=(3, -1)), "fewer than 0 layers"),
        (lambda: Shard(pp_size=2, stage_layers=(3, 2)).layers(KVLayout(layers=(MHA,) * 4, dtype=DType.INT8)), "add up to 5"),
        (lambda: Shard(tp_size=2).at(2), "rank is 2; the instance has 2"),
        (lambda: HeadSlice(source_start=0, target_start=0, count=0), "is empty or negative"),
    ],
)
def test_invalid_layouts_shards_and_slices_are_rejected(make: object, match: str) -> None:
    with pytest.raises(LayoutError, match=match):
        make()  # type: ignore[operator]


def test_an_unknown_dtype_is_refused() -> None:
    with pytest.raises(ValueError, match="float63"):
        KVLayout(layers=(MHA,), dtype="float63")  # type: ignore[arg-type]
    assert KVLayout(layers=(MHA,), dtype="float16").dtype is DType.FLOAT16  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="float63"):
        replace(STATE, dtype="float63")  # type: ignore[arg-type]
    read = replace(STATE, dtype="float32")  # type: ignore[arg-type]
    assert read == STATE32 and isinstance(read.dtype, DType)


@pytest.mark.parametrize(("tp_size", "pp_size", "num_layers"), [(1024, 1, 4096), (1, 1024, 4096), (32, 32, 32)])
def test_the_largest_instance_is_routed_fast(tp_size: int, pp_size: int, num_layers: int) -> None:
    """A peer chooses these numbers, and the loop that answers it does nothing else meanwhile."""
    layout = KVLayout.uniform(num_layers=num_layers, num_kv_heads=8, head_dim=128, dtype=DType.BFLOAT16)
    last = num_layers - pp_size + 1
    prefill = Shard(tp_size=tp_size, pp_size=pp_size, stage_layers=(1,) * (pp_size - 1) + (last,))
    taken_s = []
    for _ in range(3):  # the quickest: others on the machine, and the coverage that is traced here, only ever add to it
        begin = time.process_time()
        found = routes(layout, prefill, Shard(tp_size=8))
        taken_s.append(time.process_time() - begin)
    assert min(taken_s) < 1  # of CPU time; it takes less than a tenth of that
    assert sum(len(route.layers) * route.heads.count for route in found) == 8 * num_layers


def test_layers_that_alternate_are_one_route_for_each_number_of_heads() -> None:
    """Not one for each run: every route is a write per chunk."""
    state = LayerSpec(kind=LayerKind.RECURRENT_STATE, num_kv_heads=4, k_head_dim=8, v_head_dim=0)
    full = LayerSpec(num_kv_heads=2, k_head_dim=4, v_head_dim=4)
    layout = KVLayout(layers=(state, state, full) * 8, dtype=DType.FLOAT16)
    first, second = routes(layout, Shard(), Shard())
    assert (first.layers, second.layers) == (Range(begin=0, end=23), Range(begin=2, end=24))
    assert list(second.layers_in(layout, Range(begin=0, end=6))) == [2, 5]
    assert routes(KVLayout(layers=(full,) * 5, dtype=DType.FLOAT16), Shard(), Shard())[0].num_kv_heads is None


@pytest.mark.parametrize("name", ["fp8", "fp8_e4m3", "float8_e4m3fn"])
def test_8_bit_floats_have_the_names_of_vllm_too(name: str) -> None:
    assert DType(name) is DType.FLOAT8_E4M3
    with pytest.raises(ValueError, match="is not a valid DType"):
        DType("fp8_e5m2")
