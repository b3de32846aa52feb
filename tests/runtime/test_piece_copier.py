"""Pieces of chunks between the pages of every group and contiguous bytes, whatever has been prepared before them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.runtime.pieces import piece_of
from tests.runtime.scattered_tiers import HYBRID, GroupPages
from transfer.chunk import Chunk, ChunkPlan, Pieces, split_into_chunks
from transfer.copy import Digest, Kernels
from transfer.copy.digest import DIGEST_WORDS, DIGEST_XXH3, HostDigest, digest
from transfer.copy.piece_copier import PieceCopier
from transfer.copy.torch_copy import TorchCopier
from transfer.layer_groups import PageNeeds, layer_groups
from transfer.layout import (
    DType,
    KVLayout,
    Range,
    Route,
    Shard,
    TokenOrder,
    routes,
    wire_buffers,
    wire_dtype,
)
from transfer.pool.kv_pool import KVPool

GROUPS = layer_groups(HYBRID)


def pages_of(shard: Shard, num_tokens: int, *, seed: int, in_flight: int) -> GroupPages:
    """A rank with room for one prompt, which is called "a"; `in_flight` as long as the prompt keeps all of its pages."""
    needs = PageNeeds(groups=GROUPS, page_size=shard.page_size, tokens_in_flight=in_flight)
    pages = GroupPages(shard, needs, needs.peak(num_tokens).by_group, seed=seed)
    assert pages.reserve("a", num_tokens)
    return pages


def empty_digest(algorithm: str, kernels: Kernels) -> Digest:
    return torch.zeros(1, dtype=torch.int64) if kernels is Kernels.TRITON else HostDigest(algorithm)


def value(found: Digest) -> int:
    return found.value() if isinstance(found, HostDigest) else int(found) % 2**64


def carry_over(
    prefill: Shard,
    decode: Shard,
    plan: ChunkPlan,
    num_tokens: int,
    *,
    algorithm: str = DIGEST_XXH3,
    kernels: Kernels = Kernels.NUMPY,
) -> None:
    """A prompt from every prefill rank to every decode rank, piece by piece, and a check of all that decode may read."""
    sources = [pages_of(prefill.at(rank), num_tokens, seed=rank, in_flight=num_tokens) for rank in range(prefill.num_ranks)]
    for pages in sources:
        pages.cover("a", num_tokens)
        for part in pages.pool.parts:
            for layer in part.layers:
                pages.write("a", layer, Range(begin=0, end=num_tokens))
    targets = [pages_of(decode.at(rank), num_tokens, seed=100 + rank, in_flight=1) for rank in range(decode.num_ranks)]
    dtype = wire_dtype(HYBRID, prefill, decode)
    copiers = {id(pages): PieceCopier(pages.pool, is_source=pages in sources, kernels=kernels) for pages in (*sources, *targets)}
    for pages in targets:
        pages.allocator.begin_at("a", num_tokens)
    chunks = split_into_chunks(plan, num_tokens=num_tokens, num_layers=HYBRID.num_layers)
    for route in routes(HYBRID, prefill, decode):
        source, target = sources[route.prefill_rank], targets[route.decode_rank]
        for chunk, num_bytes in Pieces(chunks, HYBRID, route, num_tokens=num_tokens, dtype=dtype):
            wire = torch.full((num_bytes,), 0xEE, dtype=torch.uint8)
            piece = piece_of(HYBRID, route, chunk, num_tokens=num_tokens, dtype=dtype)
            sent, found = empty_digest(algorithm, kernels), empty_digest(algorithm, kernels)
            copiers[id(source)].prepare(piece, source.allocator.tables("a")).gather(wire, sent)
            copiers[id(target)].prepare(piece, target.cover("a", chunk.tokens.end)).scatter(wire, found)
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
    kernels=st.sampled_from((Kernels.fastest(torch.device("cpu")), Kernels.NUMPY, Kernels.TORCH)),
)
def test_a_prompt_is_carried_over_piece_by_piece(
    prefill: Shard, decode: Shard, plan: ChunkPlan, num_tokens: int, algorithm: str, kernels: Kernels
) -> None:
    carry_over(prefill, decode, plan, num_tokens, algorithm=algorithm, kernels=kernels)


def reference_wire(pages: GroupPages, route: Route, chunk: Chunk, num_tokens: int, dtype: DType, num_bytes: int) -> torch.Tensor:
    """By the definition of a wire, buffer by buffer, in tokens of the request."""
    wire = torch.zeros(num_bytes, dtype=torch.uint8)
    what: dict[str, Any] = {"tokens": chunk.tokens, "layers": chunk.layers, "num_tokens": num_tokens, "dtype": dtype}
    for buffer in wire_buffers(HYBRID, route, **what):
        own = HYBRID.layers[buffer.layer].dtype or dtype
        copier = TorchCopier(pages.pool.part_of(buffer.layer), heads=route.heads.source, wire_dtype=own)
        table = torch.tensor(pages.allocator.tables("a")[pages.pool.group_of(buffer.layer)])
        first_page = buffer.tokens.begin // copier.pool.page_size
        begin = buffer.tokens.begin % copier.pool.page_size
        tokens = Range(begin=begin, end=begin + len(buffer.tokens))
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
    """A copier keeps its plans. Equal chunks share a plan only if the end of the prompt does not affect them."""
    shard, dtype = Shard(page_size=page_size), DType.BFLOAT16
    plan = ChunkPlan(chunk_tokens=chunk_tokens)
    pages = pages_of(shard, 90, seed=1, in_flight=90)
    pages.cover("a", 90)
    for part in pages.pool.parts:
        for layer in part.layers:
            pages.write("a", layer, Range(begin=0, end=90))
    copier = PieceCopier(pages.pool, is_source=True)
    for num_tokens, start in prompts:
        chunks = split_into_chunks(plan, num_tokens=num_tokens, num_layers=HYBRID.num_layers, start_token=start % num_tokens)
        for route in routes(HYBRID, shard, shard):
            for chunk, num_bytes in Pieces(chunks, HYBRID, route, num_tokens=num_tokens, dtype=dtype):
                wire = torch.zeros(num_bytes, dtype=torch.uint8)
                piece = piece_of(HYBRID, route, chunk, num_tokens=num_tokens, dtype=dtype)
                copier.prepare(piece, pages.allocator.tables("a")).gather(wire)
                assert torch.equal(wire, reference_wire(pages, route, chunk, num_tokens, dtype, num_bytes))


def test_scales_are_of_the_peer() -> None:
    """Two instances with other scales for one and the same piece."""
    layout = KVLayout.uniform(num_layers=3, num_kv_heads=2, head_dim=4, dtype=DType.FLOAT16)
    shard = Shard(page_size=4)
    (route,) = routes(layout, shard, shard)
    pool = KVPool(layout=layout, shard=shard, num_pages=30)
    copier = PieceCopier(pool, is_source=True)
    pool.buffer(0, is_v=False).fill_(3.0)
    (chunk,) = split_into_chunks(ChunkPlan(chunk_tokens=4), num_tokens=4, num_layers=3)
    for scale in (2.0, 4.0, None):
        scales = None if scale is None else {(0, False): scale}
        piece = piece_of(layout, route, chunk, num_tokens=4, dtype=DType.FLOAT8_E4M3, scales=scales)
        wire = torch.zeros(piece.num_bytes, dtype=torch.uint8)
        copier.prepare(piece, ((0,),)).gather(wire)
        assert wire[:32].view(torch.float8_e4m3fn).float().eq(3.0 / (scale or 1.0)).all()
