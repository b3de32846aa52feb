from __future__ import annotations

import time
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from transfer import chunk as chunk_module
from transfer.chunk import Chunk, ChunkPlan, Pieces, check_num_pieces, largest_wire_bytes, split_into_chunks
from transfer.errors import LayoutError
from transfer.layout import DType, KVLayout, LayerKind, LayerSpec, Range, Shard, most_routes, routes, wire_buffers, wire_bytes


@given(
    chunk_tokens=st.integers(1, 50),
    layers_per_group=st.integers(0, 9),
    num_tokens=st.integers(1, 200),
    num_layers=st.integers(1, 12),
    token_layers=st.integers(0, 80),
    data=st.data(),
)
def test_every_token_of_every_layer_is_in_one_chunk(
    chunk_tokens: int, layers_per_group: int, num_tokens: int, num_layers: int, token_layers: int, data: st.DataObject
) -> None:
    start = data.draw(st.integers(0, num_tokens - 1))
    plan = ChunkPlan(chunk_tokens=chunk_tokens, layers_per_group=layers_per_group, token_layers=token_layers)
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
        most = max(layers_per_group, token_layers // len(chunk.tokens))
        assert not layers_per_group or len(chunk.layers) <= most
        is_largest = chunk.layers.end == num_layers or len(chunk.layers) == most
        assert is_largest, "a range of tokens has no more chunks than it needs"
    assert list(chunks) == sorted(chunks, key=lambda chunk: (chunk.tokens.begin, chunk.layers.begin))
    token = data.draw(st.integers(0, num_tokens + chunk_tokens))
    later = [chunks.place_of(chunk.index)[1] for chunk in chunks if chunk.tokens.end > token]
    assert chunks.range_of(token) == min(later, default=chunks.num_ranges)
    assert chunks.layer_ends == {chunk.layers.end for chunk in chunks}


@pytest.mark.parametrize(
    ("num_tokens", "start", "groups"),
    [
        (8, 0, [[2, 4, 6, 7]]),
        (4, 0, [[4, 7]]),
        (5, 0, [[3, 6, 7]]),
        (2, 0, [[7]]),
        (17, 0, [[2, 4, 6, 7], [2, 4, 6, 7], [7]]),
        (28, 5, [[5, 7], [2, 4, 6, 7], [2, 4, 6, 7], [4, 7]]),
    ],
)
def test_a_chunk_with_fewer_tokens_has_more_layers(num_tokens: int, start: int, groups: list[list[int]]) -> None:
    """So a short prompt, and the last tokens of a long one, need few pieces of no more bytes."""
    plan = ChunkPlan(chunk_tokens=8, layers_per_group=2, token_layers=17)
    chunks = split_into_chunks(plan, num_tokens=num_tokens, num_layers=7, start_token=start)
    found: dict[int, list[int]] = {}
    for chunk in chunks:
        found.setdefault(chunk.tokens.begin, []).append(chunk.layers.end)
    assert list(found.values()) == groups


def test_the_order_in_which_prefill_computes() -> None:
    plan = ChunkPlan(chunk_tokens=4, layers_per_group=2)
    found = split_into_chunks(plan, num_tokens=9, num_layers=3, start_token=2)
    expected = [
        Chunk(index=index, tokens=Range(begin=tokens[0], end=tokens[1]), layers=Range(begin=layers[0], end=layers[1]))
        for index, (tokens, layers) in enumerate(product(((2, 4), (4, 8), (8, 9)), ((0, 2), (2, 3))))
    ]
    assert list(found) == expected
    assert (found[1], found[-1], found[2:4]) == (expected[1], expected[-1], expected[2:4])
    for index in (-7, 6):
        with pytest.raises(IndexError):
            found[index]


@pytest.mark.parametrize(
    ("num_tokens", "num_layers", "start", "match"),
    [
        (0, 1, 0, "start_token is 0, num_tokens is 0"),
        (5, 1, 5, "start_token is 5, num_tokens is 5"),
        (5, 0, 0, "num_layers is 0"),
    ],
)
def test_what_cannot_be_split_is_refused(num_tokens: int, num_layers: int, start: int, match: str) -> None:
    with pytest.raises(LayoutError, match=match):
        split_into_chunks(ChunkPlan(chunk_tokens=4), num_tokens=num_tokens, num_layers=num_layers, start_token=start)
    with pytest.raises(LayoutError, match="chunk_tokens is 0"):
        ChunkPlan(chunk_tokens=0)
    with pytest.raises(LayoutError, match="layers_per_group is -1"):
        ChunkPlan(chunk_tokens=1, layers_per_group=-1)
    with pytest.raises(LayoutError, match="token_layers is -1"):
        ChunkPlan(chunk_tokens=1, token_layers=-1)


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
    num_tokens=st.integers(1, 60),
    start=st.integers(0, 59),
    token_layers=st.integers(0, 80),
)
def test_the_pieces_of_a_route_are_its_chunks_with_a_payload_and_none_is_larger_than_the_largest(
    chunk_tokens: int, layers_per_group: int, prefill_tp: int, dtype: DType, num_tokens: int, start: int, token_layers: int
) -> None:
    plan = ChunkPlan(chunk_tokens=chunk_tokens, layers_per_group=layers_per_group, token_layers=token_layers)
    found = routes(LAYOUT, Shard(tp_size=prefill_tp), Shard(tp_size=2, pp_size=2))

    def check(num_tokens: int, start: int) -> int:
        """Return the size of the largest piece of a request."""
        chunks = split_into_chunks(plan, num_tokens=num_tokens, num_layers=6, start_token=start)
        largest = 0
        for route in found:
            sizes = {}
            for chunk in chunks:
                parts = {"tokens": chunk.tokens, "layers": chunk.layers, "num_tokens": num_tokens, "dtype": dtype}
                buffers = wire_buffers(LAYOUT, route, **parts)
                sizes[chunk.index] = buffers[-1].offset_bytes + buffers[-1].num_bytes if buffers else 0
                assert sizes[chunk.index] == wire_bytes(LAYOUT, route, **parts)
            pieces = Pieces(chunks, LAYOUT, route, num_tokens=num_tokens, dtype=dtype)
            assert [(chunk.index, size) for chunk, size in pieces] == [(index, size) for index, size in sizes.items() if size]
            assert len(pieces) == sum(1 for size in sizes.values() if size)
            assert all(pieces.size_of(index) == size for index, size in sizes.items())
            assert pieces.size_of(len(chunks)) == pieces.size_of(-1) == 0
            largest = max(largest, *sizes.values())
        return largest

    largest = largest_wire_bytes(plan, LAYOUT, found, dtype)
    assert check(num_tokens, min(start, num_tokens - 1)) <= largest
    assert max(check(tokens, 0) for tokens in range(1, chunk_tokens + 1)) == largest
    assert largest_wire_bytes(plan, LAYOUT, (), dtype) == 0


@given(
    plan=st.builds(
        ChunkPlan, chunk_tokens=st.integers(1, 20), layers_per_group=st.integers(0, 3), token_layers=st.sampled_from((0, 30))
    ),
    sizes=st.sampled_from(((1, 2), (2, 1), (2, 2), (2, 4), (4, 4))),
    interleave=st.integers(1, 9),
    num_tokens=st.integers(1, 60),
    start=st.integers(0, 59),
)
def test_the_pieces_of_a_route_have_the_tokens_that_both_ranks_keep(
    plan: ChunkPlan, sizes: tuple[int, int], interleave: int, num_tokens: int, start: int
) -> None:
    """With decode context parallelism, a chunk can have no token of a route, also between others that have some."""
    layout = KVLayout(
        layers=(LayerSpec(kind=LayerKind.MLA, num_kv_heads=1, k_head_dim=3, v_head_dim=0),) * 3, dtype=DType.FLOAT16
    )
    prefill, decode = (
        Shard(tp_size=4, pp_size=stages, dcp_size=size, interleave_tokens=interleave)
        for size, stages in zip(sizes, (1, 3), strict=True)
    )
    found = routes(layout, prefill, decode)
    chunks = split_into_chunks(plan, num_tokens=num_tokens, num_layers=3, start_token=min(start, num_tokens - 1))
    for route in found:
        assert route.token_shard is not None
        largest = largest_wire_bytes(plan, layout, [route], DType.FLOAT16)
        index, size = route.token_shard.index, route.token_shard.size
        counts = {}
        for chunk in chunks:
            tokens = [token for token in range(chunk.tokens.begin, chunk.tokens.end) if token // interleave % size == index]
            counts[chunk.index] = len(tokens) * len(route.layers.intersect(chunk.layers))
        pieces = Pieces(chunks, layout, route, num_tokens=num_tokens, dtype=DType.FLOAT16)
        assert [(chunk.index, num_bytes) for chunk, num_bytes in pieces] == [
            (number, 6 * count) for number, count in counts.items() if count
        ]
        assert len(pieces) == sum(1 for count in counts.values() if count)
        assert all(pieces.size_of(number) == 6 * count <= largest for number, count in counts.items())
        assert {chunk.index: pieces.num_slices(chunk) for chunk in chunks} == counts


@pytest.mark.parametrize(("prefill_tp", "decode_tp"), [(8, 1), (1, 8)])
def test_a_long_prompt_costs_no_more_than_a_short_one(prefill_tp: int, decode_tp: int) -> None:
    """A million tokens of a model with sliding windows: their pieces were once counted layer by layer, for seconds."""
    window = LayerSpec(kind=LayerKind.SLIDING_WINDOW, num_kv_heads=16, k_head_dim=128, v_head_dim=128, window_tokens=1024)
    whole = LayerSpec(num_kv_heads=16, k_head_dim=128, v_head_dim=128)
    layout = KVLayout(layers=tuple(whole if layer % 6 == 5 else window for layer in range(62)), dtype=DType.BFLOAT16)
    found = routes(layout, Shard(tp_size=prefill_tp), Shard(tp_size=decode_tp))
    num_tokens = 1 << 20
    began_s = time.process_time()
    chunks = split_into_chunks(ChunkPlan(chunk_tokens=128), num_tokens=num_tokens, num_layers=62)
    pieces = [Pieces(chunks, layout, route, num_tokens=num_tokens, dtype=DType.BFLOAT16) for route in found]
    assert sum(map(len, pieces)) == 8 * 8192
    assert time.process_time() - began_s < 0.5  # of CPU time; it takes less than a thousandth of that


@given(
    chunk_tokens=st.integers(1, 9),
    layers_per_group=st.integers(0, 6),
    num_tokens=st.integers(1, 40),
    prefill_tp=st.integers(1, 6),
    decode_tp=st.integers(1, 6),
    start=st.integers(0, 39),
)
def test_a_plan_of_more_pieces_than_a_rank_can_keep_is_refused(
    chunk_tokens: int, layers_per_group: int, num_tokens: int, prefill_tp: int, decode_tp: int, start: int
) -> None:
    """The bound holds for chunks x routes, on the rank of either side that has the most routes."""
    plan = ChunkPlan(chunk_tokens=chunk_tokens, layers_per_group=layers_per_group)
    prefill, decode = Shard(tp_size=prefill_tp), Shard(tp_size=decode_tp)
    start_token = min(start, num_tokens - 1)
    count = len(split_into_chunks(plan, num_tokens=num_tokens, num_layers=6, start_token=start_token))
    every = routes(LAYOUT, prefill, decode)
    num_routes = max(
        max(sum(route.prefill_rank == rank for route in every) for rank in range(prefill_tp)),
        max(sum(route.decode_rank == rank for route in every) for rank in range(decode_tp)),
    )
    assert most_routes(LAYOUT, prefill, decode) == num_routes
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(chunk_module, "MAX_PIECES", count * num_routes)
        check_num_pieces(plan, LAYOUT, prefill, decode, num_tokens=num_tokens, start_token=start_token)
        patched.setattr(chunk_module, "MAX_PIECES", count * num_routes - 1)
        text = f"in chunks of {plan} are {count} chunks; a request on {num_routes} routes can have {count - 1}:"
        with pytest.raises(LayoutError, match=text):
            check_num_pieces(plan, LAYOUT, prefill, decode, num_tokens=num_tokens, start_token=start_token)


def test_errors_name_all_sizes_of_a_plan() -> None:
    """Plans that differ only in `token_layers` had the same text."""
    assert str(ChunkPlan(chunk_tokens=128)) == "128 tokens and all layers"
    assert str(ChunkPlan(chunk_tokens=128, layers_per_group=2, token_layers=300)) == "128 tokens and 2 layers (token_layers 300)"
