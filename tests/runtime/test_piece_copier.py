"""Pieces of chunks between the pages of every group and contiguous bytes, whatever has been prepared before them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.adapters.vllm_slots import kept_tokens
from tests.runtime.pieces import piece_of
from tests.runtime.scattered_tiers import HYBRID, GroupPages
from transfer.chunk import Chunk, ChunkPlan, Pieces, split_into_chunks
from transfer.copy import Digest, Kernels
from transfer.copy.digest import DIGEST_WORDS, DIGEST_XXH3, HostDigest, digest
from transfer.copy.piece_copier import PagesOfPart, PieceCopier
from transfer.copy.request_tables import RequestTables
from transfer.copy.torch_copy import TorchCopier
from transfer.errors import LayoutError
from transfer.layer_groups import PageNeeds, layer_groups
from transfer.layout import (
    DType,
    KVLayout,
    LayerKind,
    LayerSpec,
    Range,
    Route,
    Shard,
    TokenOrder,
    TokenShard,
    dcp_differences,
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


DIVIDED = KVLayout(
    layers=(
        LayerSpec(num_kv_heads=2, k_head_dim=3, v_head_dim=2),
        LayerSpec(kind=LayerKind.MLA, num_kv_heads=1, k_head_dim=4, v_head_dim=0),
    ),
    dtype=DType.FLOAT32,
)


class DividedTokens:
    """The ranks of an instance whose tokens are divided as vLLM divides them. Elements that hold no token are -1."""

    def __init__(self, shard: Shard, num_tokens: int, *, table: list[int]) -> None:
        self.shard, self.num_tokens, self.table = shard, num_tokens, table
        self.pools = [KVPool(layout=DIVIDED, shard=shard.at(rank), num_pages=64) for rank in range(shard.num_ranks)]
        self.values = [self.values_of(rank, is_filled=False) for rank in range(shard.num_ranks)]

    def values_of(self, rank: int, *, is_filled: bool = True) -> dict[tuple[int, bool], torch.Tensor]:
        """All elements of a rank, [page, token, head, dim], of each layer's K and V."""
        pool, found = self.pools[rank], {}
        for layer, spec in enumerate(DIVIDED.layers):
            for is_v in (False, True)[: spec.num_buffers]:
                wanted = torch.full_like(pool.buffer(layer, is_v=is_v), -1)
                size = self.shard.page_size
                kept = kept_tokens(pool.shard, self.num_tokens, size).items() if is_filled else ()
                for token, place in kept:
                    for head in range(wanted.shape[2]):
                        number = ((layer * 2 + is_v) * 8 + pool.shard.heads(spec.num_kv_heads).begin + head) * 1000 + token
                        wanted[self.table[place // size], place % size, head] = number
                found[layer, is_v] = wanted
        return found

    def set_to(self, *, is_filled: bool) -> None:
        for rank, pool in enumerate(self.pools):
            for (layer, is_v), values in self.values_of(rank, is_filled=is_filled).items():
                pool.buffer(layer, is_v=is_v).copy_(values)


@settings(max_examples=25)
@given(
    sizes=st.sampled_from(((1, 2), (2, 1), (2, 2), (2, 4), (4, 2), (1, 4))),
    tp_sizes=st.sampled_from(((8, 8), (8, 16), (16, 8))),
    pages_per_interleave=st.integers(1, 3),
    interleaves_per_block=st.integers(1, 3),
    page_size=st.integers(1, 5),
    chunk_tokens=st.integers(1, 40),
    num_tokens=st.integers(1, 64),
    kernels=st.sampled_from((Kernels.fastest(torch.device("cpu")), Kernels.TORCH)),
)
def test_divided_tokens_arrive_where_vllm_keeps_them(
    sizes: tuple[int, int],
    tp_sizes: tuple[int, int],
    pages_per_interleave: int,
    interleaves_per_block: int,
    page_size: int,
    chunk_tokens: int,
    num_tokens: int,
    kernels: Kernels,
) -> None:
    """With DCP, a block has whole interleaves. On the side of the smaller size, an interleave has whole blocks."""
    interleave = pages_per_interleave * page_size
    blocks = {max(sizes): interleaves_per_block * interleave, min(sizes): interleaves_per_block * interleave}
    if sizes[0] != sizes[1]:
        blocks[min(sizes)] = page_size if min(sizes) == 1 else interleave
    prefill, decode = (
        Shard(tp_size=tp_size, dcp_size=size, interleave_tokens=interleave, page_size=blocks[size])
        for tp_size, size in zip(tp_sizes, sizes, strict=True)
    )
    assert not dcp_differences(prefill, decode)
    source = DividedTokens(prefill, num_tokens, table=[(7 * page + 3) % 64 for page in range(64)])
    target = DividedTokens(decode, num_tokens, table=[(5 * page + 9) % 64 for page in range(64)])
    source.set_to(is_filled=True)
    target.set_to(is_filled=False)
    chunks = split_into_chunks(ChunkPlan(chunk_tokens=chunk_tokens), num_tokens=num_tokens, num_layers=2)
    ends = [[PieceCopier(pool, is_source=side is source, kernels=kernels) for pool in side.pools] for side in (source, target)]
    for route in routes(DIVIDED, prefill, decode):
        for chunk, num_bytes in Pieces(chunks, DIVIDED, route, num_tokens=num_tokens, dtype=DType.FLOAT32):
            wire = torch.empty(num_bytes, dtype=torch.uint8)
            piece = piece_of(DIVIDED, route, chunk, num_tokens=num_tokens, dtype=DType.FLOAT32)
            assert piece.num_bytes == num_bytes
            ends[0][route.prefill_rank].prepare(piece, [source.table]).gather(wire)
            ends[1][route.decode_rank].prepare(piece, [target.table]).scatter(wire)
    for rank, pool in enumerate(target.pools):
        for (layer, is_v), wanted in target.values_of(rank).items():
            assert torch.equal(pool.buffer(layer, is_v=is_v), wanted), (rank, layer, is_v)


def test_an_interleave_of_other_ranks_must_be_whole_pages() -> None:
    pool = KVPool(layout=DIVIDED, shard=Shard(page_size=16), num_pages=4)
    route = routes(DIVIDED, Shard(), Shard(tp_size=4, dcp_size=2, interleave_tokens=8))[0]
    chunk = split_into_chunks(ChunkPlan(chunk_tokens=32), num_tokens=32, num_layers=2)[0]
    with pytest.raises(
        LayoutError, match="pages have 16 tokens; with DCP size 1 here and 2 there, an interleave of 8 tokens must"
    ):
        PieceCopier(pool, is_source=True).prepare(piece_of(DIVIDED, route, chunk, num_tokens=32, dtype=DType.FLOAT32), [[0, 1]])


def test_a_part_of_a_page_table_grows_with_it() -> None:
    """Tables on a GPU take each entry once, and check them."""
    pages = list(range(40, 53))
    tables = RequestTables(torch.device("cpu"), 64, current_stream=lambda device: 0)
    for num_known in (3, 9, 13):
        part = PagesOfPart(pages[:num_known], TokenShard(size=3, index=1, interleave_tokens=2))
        wanted = [page for entry, page in enumerate(pages[:num_known]) if entry // 2 % 3 == 1]
        assert [part[entry] for entry in range(len(part))] == list(part) == wanted
        table = tables.cover("a", part, 0, len(wanted))
        assert table.use()[: len(wanted)].tolist() == wanted


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
