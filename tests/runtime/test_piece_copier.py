"""Pieces of chunks between the pages of every group and contiguous bytes, whatever has been prepared before them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from node_runtime.piece_copier import PieceCopier
from tests.runtime.scattered_tiers import HYBRID, GroupPages
from transfer.chunk import Chunk, ChunkPlan, Pieces, split_into_chunks
from transfer.kernels import CopyPlan, Digest
from transfer.kernels.digest import DIGEST_WORDS, DIGEST_XXH3, HostDigest, digest
from transfer.kernels.reference import ReferenceCopier
from transfer.kv_pool import KVPool
from transfer.layer_groups import PageNeeds, layer_groups
from transfer.layout import (
    DType,
    HeadSlice,
    KVLayout,
    LayerKind,
    LayerSpec,
    Route,
    Shard,
    Span,
    TokenOrder,
    routes,
    wire_buffers,
    wire_dtype,
)

GROUPS = layer_groups(HYBRID)


def pages_of(shard: Shard, num_tokens: int, *, seed: int, in_flight: int) -> GroupPages:
    """A rank with room for one prompt, which is called "a"; `in_flight` as long as the prompt keeps all of its pages."""
    needs = PageNeeds(groups=GROUPS, page_size=shard.page_size, tokens_in_flight=in_flight)
    pages = GroupPages(shard, needs, needs.peak(num_tokens).by_group, seed=seed)
    assert pages.reserve("a", num_tokens)
    return pages


def empty_digest(algorithm: str, has_kernels: bool) -> Digest:
    return torch.zeros(1, dtype=torch.int64) if has_kernels else HostDigest(algorithm)


def value(found: Digest) -> int:
    return found.value() if isinstance(found, HostDigest) else int(found) % 2**64


def carry_over(
    prefill: Shard,
    decode: Shard,
    plan: ChunkPlan,
    num_tokens: int,
    *,
    algorithm: str = DIGEST_XXH3,
    has_kernels: bool = False,
) -> None:
    """A prompt from every prefill rank to every decode rank, piece by piece, and a check of all that decode may read."""
    sources = [pages_of(prefill.at(rank), num_tokens, seed=rank, in_flight=num_tokens) for rank in range(prefill.num_ranks)]
    for pages in sources:
        pages.cover("a", num_tokens)
        for part in pages.pool.parts:
            for layer in part.layers:
                pages.write("a", layer, Span(begin=0, end=num_tokens))
    targets = [pages_of(decode.at(rank), num_tokens, seed=100 + rank, in_flight=1) for rank in range(decode.num_ranks)]
    dtype = wire_dtype(HYBRID, prefill, decode)
    copiers = {id(pages): PieceCopier(pages.pool) for pages in (*sources, *targets)}
    for pages in targets:
        pages.allocator.begin_at("a", num_tokens)
    chunks = split_into_chunks(plan, num_tokens=num_tokens, num_layers=HYBRID.num_layers)
    for route in routes(HYBRID, prefill, decode):
        source, target, heads = sources[route.prefill_rank], targets[route.decode_rank], route.heads
        for chunk, num_bytes in Pieces(chunks, HYBRID, route, num_tokens=num_tokens, dtype=dtype):
            wire = torch.full((num_bytes,), 0xEE, dtype=torch.uint8)
            what: dict[str, Any] = {"num_tokens": num_tokens, "dtype": dtype, "request_id": "a"}
            sent, found = empty_digest(algorithm, has_kernels), empty_digest(algorithm, has_kernels)
            held = Span(begin=heads.source_start, end=heads.source_start + heads.count)
            tables: Sequence[Sequence[int]] = source.allocator.tables("a")
            copiers[id(source)].prepare(HYBRID, route, chunk, heads=held, tables=tables, **what).gather(wire, sent)
            wanted = Span(begin=heads.target_start, end=heads.target_start + heads.count)
            tables = target.cover("a", chunk.tokens.end)
            copiers[id(target)].prepare(HYBRID, route, chunk, heads=wanted, tables=tables, **what).scatter(wire, found)
            assert value(sent) == value(found) == digest(wire, algorithm)
    for pages in targets:
        through = [prefill.pool_dtype(HYBRID), dtype, decode.pool_dtype(HYBRID)]
        pages.assert_readable("a", num_tokens, through, computed=num_tokens)


shards = st.builds(
    Shard,
    tp_size=st.integers(1, 4),
    page_size=st.integers(1, 9),
    order=st.sampled_from(TokenOrder),
    dtype=st.sampled_from((None, DType.FLOAT8_E4M3, DType.FLOAT32)),
)


@settings(max_examples=25)
@given(
    prefill=shards,
    decode=shards,
    plan=st.builds(ChunkPlan, chunk_tokens=st.integers(1, 40), layers_per_group=st.integers(0, 7)),
    num_tokens=st.integers(1, 90),
    algorithm=st.sampled_from((DIGEST_XXH3, DIGEST_WORDS)),
)
def test_a_prompt_is_carried_over_piece_by_piece(
    prefill: Shard, decode: Shard, plan: ChunkPlan, num_tokens: int, algorithm: str
) -> None:
    carry_over(prefill, decode, plan, num_tokens, algorithm=algorithm)


def reference_wire(pages: GroupPages, route: Route, chunk: Chunk, num_tokens: int, dtype: DType, num_bytes: int) -> torch.Tensor:
    """By the definition of a wire, buffer by buffer, in tokens of the request."""
    wire = torch.zeros(num_bytes, dtype=torch.uint8)
    heads = Span(begin=route.heads.source_start, end=route.heads.source_start + route.heads.count)
    what: dict[str, Any] = {"tokens": chunk.tokens, "layers": chunk.layers, "num_tokens": num_tokens, "dtype": dtype}
    for buffer in wire_buffers(HYBRID, route, **what):
        own = HYBRID.layers[buffer.layer].dtype or dtype
        copier = ReferenceCopier(pages.pool.part_of(buffer.layer), heads=heads, wire_dtype=own)
        table = torch.tensor(pages.allocator.tables("a")[pages.pool.group_of(buffer.layer)])
        first_page = buffer.tokens.begin // copier.pool.page_size
        begin = buffer.tokens.begin % copier.pool.page_size
        tokens = Span(begin=begin, end=begin + len(buffer.tokens))
        copier.plan([replace(buffer, tokens=tokens)]).gather(table, wire, first_page=first_page)
    return wire


@settings(max_examples=25)
@given(
    page_size=st.integers(1, 9),
    chunk_tokens=st.integers(1, 30),
    prompts=st.lists(st.tuples(st.integers(1, 90), st.integers(0, 89)), min_size=2, max_size=5),
)
def test_what_was_prepared_for_one_prompt_is_right_for_the_next(
    page_size: int, chunk_tokens: int, prompts: list[tuple[int, int]]
) -> None:
    """A copier keeps what it has laid out. Equal chunks share it only where the prompt's end makes no difference to them."""
    shard, dtype = Shard(page_size=page_size), DType.BFLOAT16
    plan = ChunkPlan(chunk_tokens=chunk_tokens)
    pages = pages_of(shard, 90, seed=1, in_flight=90)
    pages.cover("a", 90)
    for part in pages.pool.parts:
        for layer in part.layers:
            pages.write("a", layer, Span(begin=0, end=90))
    copier = PieceCopier(pages.pool)
    for num_tokens, start in prompts:
        chunks = split_into_chunks(plan, num_tokens=num_tokens, num_layers=HYBRID.num_layers, start_token=start % num_tokens)
        for route in routes(HYBRID, shard, shard):
            heads = Span(begin=0, end=route.heads.count)
            for chunk, num_bytes in Pieces(chunks, HYBRID, route, num_tokens=num_tokens, dtype=dtype):
                wire = torch.zeros(num_bytes, dtype=torch.uint8)
                tables = pages.allocator.tables("a")
                what: dict[str, Any] = {"num_tokens": num_tokens, "dtype": dtype, "request_id": "a"}
                piece = copier.prepare(HYBRID, route, chunk, heads=heads, tables=tables, **what)
                piece.gather(wire)
                assert torch.equal(wire, reference_wire(pages, route, chunk, num_tokens, dtype, num_bytes))


def one_group_copier(page_size: int = 4) -> tuple[PieceCopier, KVLayout, Route]:
    layout = KVLayout.uniform(num_layers=3, num_kv_heads=2, head_dim=4, dtype=DType.FLOAT16)
    shard = Shard(page_size=page_size)
    (route,) = routes(layout, shard, shard)
    return PieceCopier(KVPool(layout=layout, shard=shard, num_pages=30)), layout, route


def plan_of(copier: PieceCopier, layout: KVLayout, route: Route, chunk: Chunk, num_tokens: int) -> CopyPlan:
    piece = copier.prepare(
        layout,
        route,
        chunk,
        heads=Span(begin=0, end=2),
        num_tokens=num_tokens,
        dtype=DType.FLOAT16,
        tables=(list(range(-(-num_tokens // 4))),),
        request_id="a",
    )
    (part,) = piece.parts
    return part.plan


def test_equal_chunks_are_laid_out_once() -> None:
    """Laying a chunk out costs more than preparing its copy, on the loop that has everything else to do."""
    copier, layout, route = one_group_copier()
    plan = ChunkPlan(chunk_tokens=8)
    found = [
        plan_of(copier, layout, route, chunk, num_tokens)
        for num_tokens in (24, 80)
        for chunk in split_into_chunks(plan, num_tokens=num_tokens, num_layers=3)
    ]
    assert len(found) == 13 and all(plan is found[0] for plan in found)
    shorter = split_into_chunks(plan, num_tokens=21, num_layers=3)[-1]
    assert plan_of(copier, layout, route, shorter, 21) is not found[0]


def test_chunks_that_a_window_leaves_whole_or_out_are_laid_out_once() -> None:
    """However long the prompt is; only the chunk that a window begins in looks different."""
    window = LayerSpec(kind=LayerKind.SLIDING_WINDOW, num_kv_heads=2, k_head_dim=4, v_head_dim=4, window_tokens=20)
    full = LayerSpec(num_kv_heads=2, k_head_dim=4, v_head_dim=4)
    layout, shard = KVLayout(layers=(full, window), dtype=DType.FLOAT16), Shard(page_size=4)
    (route,) = routes(layout, shard, shard)
    copier = PieceCopier(KVPool(layout=layout, shard=shard, num_pages=(60, 60)))
    found: dict[int, set[int]] = {}
    kept: list[object] = []
    for num_tokens in (80, 82, 84, 86, 104, 160):
        for chunk in split_into_chunks(ChunkPlan(chunk_tokens=8), num_tokens=num_tokens, num_layers=2):
            piece = copier.prepare(
                layout,
                route,
                chunk,
                request_id="a",
                heads=Span(begin=0, end=2),
                num_tokens=num_tokens,
                dtype=DType.FLOAT16,
                tables=(range(40), range(40)),
            )
            kept.append(piece)
            if len(chunk.tokens) == 8:
                found.setdefault(max(0, min(8, num_tokens - 20 - chunk.tokens.begin)), set()).add(id(piece.plan))
    assert sorted(found) == [0, 2, 4, 6, 8] and all(len(plans) == 1 for plans in found.values())


def test_equal_routes_and_scales_share_what_is_laid_out() -> None:
    """They are decoded anew for each session, and may be made anew for each request."""
    copier, layout, route = one_group_copier()
    (chunk,) = split_into_chunks(ChunkPlan(chunk_tokens=8), num_tokens=8, num_layers=3)
    what: dict[str, Any] = {
        "heads": Span(begin=0, end=2),
        "num_tokens": 8,
        "dtype": DType.FLOAT8_E4M3,
        "tables": ((3, 1),),
        "request_id": "a",
    }
    first = copier.prepare(layout, route, chunk, scales={(0, False): 2.0}, **what).plan
    for _ in range(2100):  # more than are known by identity
        assert copier.prepare(layout, replace(route), chunk, scales={(0, False): 2.0}, **what).plan is first
    assert copier.prepare(layout, route, chunk, scales={(0, False): 3.0}, **what).plan is not first


def test_every_head_slice_has_a_copier_of_its_own() -> None:
    """Instances of several cuts can be attached to one rank; slices may begin or end alike."""
    copier, layout, route = one_group_copier()
    (chunk,) = split_into_chunks(ChunkPlan(chunk_tokens=8), num_tokens=8, num_layers=3)
    for heads in (Span(begin=0, end=2), Span(begin=1, end=2), Span(begin=0, end=1)):
        of_slice = replace(route, heads=HeadSlice(source_start=heads.begin, target_start=0, count=len(heads)))
        what: dict[str, Any] = {"num_tokens": 8, "dtype": DType.FLOAT16, "tables": ((3, 1),), "request_id": "a"}
        (part,) = copier.prepare(layout, of_slice, chunk, heads=heads, **what).parts
        assert {buffer.row_bytes for buffer in part.plan.buffers} == {len(heads) * 4 * 2}


def test_scales_are_of_the_peer() -> None:
    """Two instances with other scales for one and the same piece."""
    layout = KVLayout.uniform(num_layers=3, num_kv_heads=2, head_dim=4, dtype=DType.FLOAT16)
    shard = Shard(page_size=4)
    (route,) = routes(layout, shard, shard)
    pool = KVPool(layout=layout, shard=shard, num_pages=30)
    copier = PieceCopier(pool)
    pool.buffer(0, is_v=False).fill_(3.0)
    (chunk,) = split_into_chunks(ChunkPlan(chunk_tokens=4), num_tokens=4, num_layers=3)
    what: dict[str, Any] = {
        "num_tokens": 4,
        "dtype": DType.FLOAT8_E4M3,
        "tables": ((0,),),
        "request_id": "a",
        "heads": Span(begin=0, end=2),
    }
    for scale in (2.0, 4.0, None):
        piece = copier.prepare(layout, route, chunk, scales=None if scale is None else {(0, False): scale}, **what)
        wire = torch.zeros(piece.num_wire_bytes, dtype=torch.uint8)
        piece.gather(wire)
        assert wire[:32].view(torch.float8_e4m3fn).float().eq(3.0 / (scale or 1.0)).all()


def test_another_layout_forgets_what_the_last_one_had() -> None:
    copier, layout, route = one_group_copier()
    chunk = split_into_chunks(ChunkPlan(chunk_tokens=8), num_tokens=8, num_layers=3)[0]
    before = plan_of(copier, layout, route, chunk, 8)
    same = KVLayout(layers=layout.layers, dtype=layout.dtype)  # what another attach has decoded: equal, another object
    again = plan_of(copier, same, route, chunk, 8)
    assert again.buffers == before.buffers and again is not before


def test_pages_are_those_of_the_groups_own_table() -> None:
    """A window that begins pages behind the chunk's first one: what the table has there is no page."""
    window = replace(HYBRID.layers[2], num_kv_heads=4)
    layout = KVLayout(layers=(LayerSpec(num_kv_heads=4, k_head_dim=8, v_head_dim=6), window), dtype=DType.BFLOAT16)
    shard = Shard(page_size=4)
    pool = KVPool(layout=layout, shard=shard, num_pages=(30, 30))
    (route,) = routes(layout, shard, shard)
    (chunk,) = split_into_chunks(ChunkPlan(chunk_tokens=64), num_tokens=50, num_layers=2)
    full = list(range(13))
    windows = [-1] * 7 + [20, 21, 22, 23, 24, 25]  # of tokens 30 to 49
    piece = PieceCopier(pool).prepare(
        layout,
        route,
        chunk,
        heads=Span(begin=0, end=4),
        num_tokens=50,
        dtype=DType.BFLOAT16,
        tables=(full, windows),
        request_id="a",
    )
    first, second = piece.parts
    assert first.pages.tolist() == full and second.pages.tolist() == windows[7:]
    assert {buffer.tokens for buffer in first.plan.buffers} == {Span(begin=0, end=50)}
    assert {buffer.tokens for buffer in second.plan.buffers} == {Span(begin=2, end=22)}
