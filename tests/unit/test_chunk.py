from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from transfer import chunk as chunk_module
from transfer.chunk import Chunk, ChunkPlan, check_num_chunks, largest_wire_bytes, pieces_of, pieces_of_request, split_into_chunks
from transfer.errors import LayoutError
from transfer.layout import DType, KVLayout, LayerKind, LayerSpec, Shard, Span, routes, wire_bytes


@given(
    chunk_tokens=st.integers(1, 50),
    layers_per_group=st.integers(0, 9),
    num_tokens=st.integers(1, 200),
    num_layers=st.integers(1, 12),
    data=st.data(),
)
def test_every_token_of_every_layer_is_in_one_chunk(
    chunk_tokens: int, layers_per_group: int, num_tokens: int, num_layers: int, data: st.DataObject
) -> None:
    start = data.draw(st.integers(0, num_tokens - 1))
    plan = ChunkPlan(chunk_tokens=chunk_tokens, layers_per_group=layers_per_group)
    chunks = split_into_chunks(plan, num_tokens=num_tokens, num_layers=num_layers, start_token=start)
    seen = [
        (layer, token)
        for chunk in chunks
        for token in range(chunk.tokens.begin, chunk.tokens.end)
        for layer in range(chunk.layers.begin, chunk.layers.end)
    ]
    assert len(seen) == len(set(seen))
    assert set(seen) == {(layer, token) for layer in range(num_layers) for token in range(start, num_tokens)}
    assert [chunk.index for chunk in chunks] == list(range(len(chunks)))
    assert all(len(chunk.tokens) and len(chunk.layers) for chunk in chunks)
    for chunk in chunks:
        # On the grid counted from token 0, so that a prefix that decode already holds moves no boundary.
        assert chunk.tokens.begin % chunk_tokens == 0 or chunk.tokens.begin == start
        assert chunk.tokens.end % chunk_tokens == 0 or chunk.tokens.end == num_tokens
        assert len(chunk.tokens) <= chunk_tokens
        assert not layers_per_group or len(chunk.layers) <= layers_per_group
    assert chunks == tuple(sorted(chunks, key=lambda chunk: (chunk.tokens.begin, chunk.layers.begin)))


def test_the_order_in_which_prefill_computes() -> None:
    plan = ChunkPlan(chunk_tokens=4, layers_per_group=2)
    found = split_into_chunks(plan, num_tokens=9, num_layers=3, start_token=2)
    assert found == tuple(
        Chunk(index=index, tokens=Span(begin=tokens[0], end=tokens[1]), layers=Span(begin=layers[0], end=layers[1]))
        for index, (tokens, layers) in enumerate(product(((2, 4), (4, 8), (8, 9)), ((0, 2), (2, 3))))
    )


def test_a_prefix_moves_no_boundary() -> None:
    plan = ChunkPlan(chunk_tokens=16)
    whole = split_into_chunks(plan, num_tokens=100, num_layers=1)
    rest = split_into_chunks(plan, num_tokens=100, num_layers=1, start_token=20)
    assert [chunk.tokens for chunk in rest[1:]] == [chunk.tokens for chunk in whole[2:]]
    assert rest[0].tokens == Span(begin=20, end=32)


@pytest.mark.parametrize(
    ("num_tokens", "num_layers", "start", "match"),
    [
        (0, 1, 0, "start_token is 0, num_tokens is 0"),
        (5, 1, 5, "start_token is 5, num_tokens is 5"),
        (5, 1, -1, "start_token is -1"),
        (5, 0, 0, "num_layers is 0"),
    ],
)
def test_nothing_to_cut(num_tokens: int, num_layers: int, start: int, match: str) -> None:
    with pytest.raises(LayoutError, match=match):
        split_into_chunks(ChunkPlan(chunk_tokens=4), num_tokens=num_tokens, num_layers=num_layers, start_token=start)


def test_a_plan_is_checked() -> None:
    with pytest.raises(LayoutError, match="chunk_tokens is 0"):
        ChunkPlan(chunk_tokens=0)
    with pytest.raises(LayoutError, match="layers_per_group is -1"):
        ChunkPlan(chunk_tokens=1, layers_per_group=-1)


LAYOUT = KVLayout(
    layers=(
        LayerSpec(num_kv_heads=4, k_head_dim=8, v_head_dim=4),
        LayerSpec(kind=LayerKind.SLIDING_WINDOW, num_kv_heads=4, k_head_dim=8, v_head_dim=8, window_tokens=9),
        LayerSpec(kind=LayerKind.MLA, num_kv_heads=1, k_head_dim=40, v_head_dim=0),
        LayerSpec(kind=LayerKind.RECURRENT_STATE, num_kv_heads=4, k_head_dim=100, v_head_dim=0),
        LayerSpec(kind=LayerKind.MLA, num_kv_heads=1, k_head_dim=3, v_head_dim=0),
        LayerSpec(kind=LayerKind.RECURRENT_STATE, num_kv_heads=4, k_head_dim=5, v_head_dim=0, dtype=DType.FLOAT32),
    ),
    dtype=DType.BFLOAT16,
)


@given(
    chunk_tokens=st.integers(1, 20),
    layers_per_group=st.integers(0, 6),
    prefill_tp=st.integers(1, 6),
    dtype=st.sampled_from((DType.FLOAT32, DType.FLOAT16, DType.FLOAT8_E4M3)),
    data=st.data(),
)
def test_no_piece_of_any_request_is_larger_than_the_largest(
    chunk_tokens: int, layers_per_group: int, prefill_tp: int, dtype: DType, data: st.DataObject
) -> None:
    plan = ChunkPlan(chunk_tokens=chunk_tokens, layers_per_group=layers_per_group)
    found = routes(LAYOUT, Shard(tp_size=prefill_tp), Shard(tp_size=2, pp_size=2))
    largest = largest_wire_bytes(plan, LAYOUT, found, dtype)

    def pieces(num_tokens: int, start: int) -> list[int]:
        return [
            wire_bytes(LAYOUT, route, tokens=chunk.tokens, layers=chunk.layers, num_tokens=num_tokens, dtype=dtype)
            for chunk in split_into_chunks(plan, num_tokens=num_tokens, num_layers=6, start_token=start)
            for route in found
        ]

    num_tokens = data.draw(st.integers(1, 60))
    start = data.draw(st.integers(0, num_tokens - 1))
    assert max(pieces(num_tokens, start)) <= largest
    chunks = split_into_chunks(plan, num_tokens=num_tokens, num_layers=6, start_token=start)
    for route in found:
        remembered = pieces_of_request(plan, LAYOUT, route, num_tokens=num_tokens, start_token=start, dtype=dtype)
        assert list(remembered) == list(pieces_of(chunks, LAYOUT, route, num_tokens=num_tokens, dtype=dtype))
    assert max(pieces(chunk_tokens, 0)) == largest


def test_without_routes_there_is_no_largest_piece() -> None:
    assert largest_wire_bytes(ChunkPlan(chunk_tokens=4), LAYOUT, (), DType.FLOAT16) == 0


@given(
    chunk_tokens=st.integers(1, 9),
    layers_per_group=st.integers(0, 6),
    num_tokens=st.integers(1, 40),
    num_layers=st.integers(1, 6),
    start=st.integers(0, 39),
)
def test_more_chunks_than_a_rank_can_prepare_are_refused_before_they_are_cut(
    chunk_tokens: int, layers_per_group: int, num_tokens: int, num_layers: int, start: int
) -> None:
    """The count is that of the chunks, so a plan is refused exactly where it makes one too many."""
    plan = ChunkPlan(chunk_tokens=chunk_tokens, layers_per_group=layers_per_group)
    start_token = min(start, num_tokens - 1)
    request = {"num_tokens": num_tokens, "num_layers": num_layers, "start_token": start_token}
    count = len(split_into_chunks(plan, **request))
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(chunk_module, "MAX_CHUNKS", count)
        check_num_chunks(plan, **request)
        patched.setattr(chunk_module, "MAX_CHUNKS", count - 1)
        with pytest.raises(LayoutError, match=f"are {count} chunks; a request can have {count - 1}"):
            check_num_chunks(plan, **request)
