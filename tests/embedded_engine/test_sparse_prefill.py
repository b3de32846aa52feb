"""Block-sparse prefill: which blocks are selected, tokens of full attention where all are, and refusals."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from embedded_engine.attention import RunningSoftmax, Scores
from embedded_engine.engine import EmbeddedEngine
from embedded_engine.kernels import block_sparse_reference
from embedded_engine.sparse_prefill import ChunkBlocks, SparseChunk, SparsePrefill, UnitPages
from planner.workspace import Strategy, XAttention, sparse_prefill_workspaces
from tests.embedded_engine.conftest import Generate
from tests.embedded_engine.sparse_cases import CASES, SparseCase, attended
from tests.embedded_engine.steps import Directory, PageBook, decode_all, make_engine
from tests.embedded_engine.test_host_prefill import Hosted, load
from transfer.errors import ConfigError, EngineError
from transfer.layout import DType, Shard, TokenOrder

ALL = XAttention(block_size=64, stride=8, threshold=1)
LENGTHS = {"a": 300, "b": 5, "c": 200, "d": 140}
HOSTED = ("a", "d")
NUM_TOKENS = 6
CHUNK = 90


@pytest.fixture(scope="module")
def prompts() -> dict[str, tuple[int, ...]]:
    generator = random.Random(5)
    return {name: tuple(generator.randrange(3, 240) for _ in range(length)) for name, length in LENGTHS.items()}


def sparse_engine(directory: Path, shard: Shard, policy: XAttention, **settings: Any) -> EmbeddedEngine:
    return make_engine(directory, shard, num_tokens=1024, sparse_prefill=policy, chunk_tokens=CHUNK, **settings)


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.dtype is DType.FLOAT32])
def test_attention_is_that_of_the_selected_blocks(name: str) -> None:
    """Compared with masks over all tokens, and the selection with its definition."""
    case = CASES[name]
    query, spans = case.inputs("cpu")
    found = attended(block_sparse_reference, query, spans, case.policy)
    block, own = case.policy.block_size, spans[-1].first_block
    keys = [torch.arange(span.num_tokens) // block + span.first_block for span in spans]
    mask = torch.full((1, case.heads[0], case.rows, sum(map(len, keys))), -torch.inf)
    for head, lists in enumerate(found.lists):
        for row, blocks in enumerate(lists):
            assert blocks == sorted(set(blocks)) and {0, own + row} <= set(blocks) <= set(range(own + row + 1))
            mask[0, head, row * block : (row + 1) * block, torch.isin(torch.cat(keys), torch.tensor(blocks))] = 0
    mask[..., -case.rows :] += torch.full((case.rows, case.rows), -torch.inf).triu(1)
    running = RunningSoftmax(query[None], case.heads[1], case.dim, Scores(scale=case.dim**-0.5))
    k, v = ([], [])
    for span in spans:
        tokens = torch.arange(span.num_tokens)
        pages = tokens // span.k.shape[1] if span.pages is None else span.pages[tokens // span.k.shape[1]]
        k.append(span.k[pages, tokens % span.k.shape[1]])
        v.append(span.v[pages, tokens % span.v.shape[1]])
    running.add(torch.cat(k).transpose(0, 1)[None], torch.cat(v).transpose(0, 1)[None], mask)
    torch.testing.assert_close(found.out, running.result()[0], atol=1e-5, rtol=0)
    seen = [own + row + 1 for row in range(len(found.lists[0]))]
    if case.policy.threshold == 1:
        assert all([len(blocks) for blocks in lists] == seen for lists in found.lists)


@pytest.mark.parametrize("rows", [1, 5, 64])
def test_a_short_chunk_sees_every_key(rows: int) -> None:
    """As after a stored prefix. A group of few queries is scored with all keys of a group, not with one residue of them."""
    for position in range(3 * 64 + 8, 3 * 64 + 16):
        case = SparseCase(num_earlier=640, rows=rows, policy=XAttention(block_size=64, stride=8, threshold=0.5))
        query, spans = case.inputs("cpu")
        direction = torch.nn.functional.normalize(torch.ones(case.dim), dim=0)
        query[:] = 300 * direction
        for span in spans:
            span.k.mul_(0)
        spans[0].k[spans[0].pages[position // case.page_size], position % case.page_size] = direction
        found = attended(block_sparse_reference, query, spans, case.policy)
        assert all(3 in blocks for lists in found.lists for blocks in lists), position


def test_estimates_in_parts_are_those_of_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """A long prompt is estimated a few blocks at a time, so that memory is bounded."""
    case = CASES["half"]
    query, spans = case.inputs("cpu")
    whole = attended(block_sparse_reference, query, spans, case.policy)
    monkeypatch.setattr(block_sparse_reference, "MAX_SCORES", 1)
    parts = attended(block_sparse_reference, query, spans, case.policy)
    assert parts.lists == whole.lists
    torch.testing.assert_close(parts.out, whole.out)


def test_an_important_block_is_selected_and_the_others_are_not() -> None:
    """The queries of the last block look for one direction, which only the keys of block 3 have."""
    case = SparseCase(num_earlier=640, rows=64, policy=XAttention(block_size=64, stride=8, threshold=0.5))
    query, spans = case.inputs("cpu")
    direction = torch.nn.functional.normalize(torch.ones(case.dim), dim=0)
    query[:] = 20 * direction
    earlier = spans[0]
    earlier.k.mul_(0.01)
    tokens = torch.arange(3 * 64, 4 * 64)
    earlier.k[earlier.pages[tokens // case.page_size], tokens % case.page_size] = direction
    found = attended(block_sparse_reference, query, spans, case.policy)
    assert found.lists == [[[0, 3, 10]]] * case.heads[0]
    assert found.is_used == [1, 0, 0, 1, 0, 0, 0, 0, 0, 0, 1]


@pytest.mark.parametrize(
    ("family", "shard"),
    [
        ("llama", Shard(page_size=4)),
        ("llama", Shard(page_size=128, order=TokenOrder.HND)),
        ("qwen3_next", Shard(page_size=16)),
    ],
)
def test_with_all_blocks_tokens_are_those_of_full_attention(
    family_dir: Directory, prompts: dict[str, tuple[int, ...]], generate: Generate, family: str, shard: Shard
) -> None:
    """Prompts on the device and in host memory share the steps, and chunks end within blocks and pages."""
    directory = family_dir(family)
    engine = sparse_engine(directory, shard, ALL)
    book = PageBook.of(engine, {name: length + NUM_TOKENS for name, length in LENGTHS.items()})
    hosted = Hosted(engine, {name: LENGTHS[name] for name in HOSTED}, pages_per_block=max(1, 64 // shard.page_size))
    first = hosted.prefill(prompts, book, chunk_tokens=CHUNK)
    load(engine, hosted.host, hosted.tables, book, HOSTED)
    found = decode_all(engine, first, LENGTHS, book, NUM_TOKENS)
    assert found == {name: generate(directory, prompts[name], NUM_TOKENS) for name in LENGTHS}
    assert engine.prefill_counts is not None and engine.prefill_counts.density == 1


def test_fewer_blocks_are_read_below_the_threshold(demo_dir: Path, prompts: dict[str, tuple[int, ...]]) -> None:
    """KV in host memory and on the device leads to the same selection, and so to the same logits."""
    policy = XAttention(block_size=64, stride=8, threshold=0.4)
    found = []
    for hosted_names in ((), ("a",)):
        engine = sparse_engine(demo_dir, Shard(page_size=4), policy)
        book = PageBook.of(engine, {"a": LENGTHS["a"]})
        hosted = Hosted(engine, {name: LENGTHS[name] for name in hosted_names} or {"other": 4}, pages_per_block=16)
        logits = None
        for begin in range(0, LENGTHS["a"], CHUNK):
            part = prompts["a"][begin : begin + CHUNK]
            item = hosted.item("a", part, begin, book, is_last=begin + CHUNK >= LENGTHS["a"])
            logits = engine.logits(engine.prefill_batch([item]))
        assert logits is not None and engine.prefill_counts is not None
        assert 0.3 < engine.prefill_counts.density < 0.95
        assert (engine.prefill_counts.loaded_bytes > 0) == ("a" in hosted_names)
        found.append(logits)
    torch.testing.assert_close(found[1], found[0], atol=1e-4, rtol=0)


@pytest.mark.parametrize("page_size", [16, 128])
def test_the_pages_that_a_selection_needs(page_size: int) -> None:
    """Each needed page lies at its place in the buffer of its fetch, and the bounds of a fetch contain exactly its blocks."""
    policy = XAttention(block_size=64)
    sparse = SparsePrefill(policy, (), block_sparse_reference, page_size=page_size, device=torch.device("cpu"))
    num_blocks = 13
    pages = torch.randperm(60, generator=torch.Generator().manual_seed(1))[: -(-num_blocks * 64 // page_size)]
    units = UnitPages(sparse, pages, page_size=page_size, units_per_fetch=2)
    blocks_per_page = max(1, page_size // 64)
    for needed in ([], [0], [12], [1, 2, 3, 7, 11], list(range(num_blocks))):
        is_used = torch.zeros(num_blocks, dtype=torch.int32)
        is_used[needed] = 1
        chosen, counts, places, bounds = units.needed(is_used)
        size = 2 * sparse.unit_tokens // page_size
        seen = []
        for fetch, count in enumerate(counts.tolist()):
            buffer = chosen[fetch * size :][:count]
            for block in needed:
                if bounds[fetch] <= block < bounds[fetch + 1]:
                    seen.append(block)
                    own = np.arange(block * 64, block * 64 + 64) // page_size
                    assert [int(buffer[places[page]]) for page in own] == pages[own].tolist()
        assert seen == needed
        fetched = int(counts.sum()) * page_size // 64
        assert len(needed) <= fetched <= len(needed) * blocks_per_page + blocks_per_page


@pytest.mark.parametrize("strategy", Strategy)
def test_workspaces_are_those_of_the_declaration(demo_dir: Path, prompts: dict[str, tuple[int, ...]], strategy: Strategy) -> None:
    policy = XAttention(block_size=64, strategy=strategy)
    engine = sparse_engine(demo_dir, Shard(page_size=16), policy, max_seq_len=320)
    heads = engine.files.config.num_attention_heads
    declared = {
        one.name: one.num_bytes for one in sparse_prefill_workspaces(policy, num_heads=heads, chunk_tokens=CHUNK, max_seq_len=320)
    }
    assert engine.workspace_bytes == (declared if strategy is Strategy.CHUNK_BOUNDED else {})
    book = PageBook.of(engine, {"a": 300})
    hosted = Hosted(engine, {"other": 16}, pages_per_block=4)
    hosted.prefill({"a": prompts["a"]}, book, chunk_tokens=CHUNK)
    assert engine.workspace_bytes == declared


def test_a_step_that_is_longer_than_declared_is_refused(demo_dir: Path, prompts: dict[str, tuple[int, ...]]) -> None:
    engine = sparse_engine(demo_dir, Shard(page_size=16), ALL, max_seq_len=320)
    hosted = Hosted(engine, {"other": 16}, pages_per_block=4)
    with pytest.raises(EngineError, match=r"block_lse of a prompt has .*raise chunk.chunk_tokens or limits.max_seq_len"):
        hosted.prefill({"a": prompts["a"]}, PageBook.of(engine, {"a": 300}), chunk_tokens=300)


@pytest.mark.parametrize(("family", "kind"), [("gemma3", "sliding_window"), ("deepseek_v2", "mla")])
def test_models_without_it_are_refused_by_name(family_dir: Directory, family: str, kind: str) -> None:
    with pytest.raises(ConfigError, match=f"prefill.sparse_policy is xattention; .* has layers of kind {kind}; .* must be none"):
        sparse_engine(family_dir(family), Shard(page_size=4), ALL)


def test_soft_caps_are_refused() -> None:
    sparse = SparsePrefill(ALL, (), block_sparse_reference, page_size=16, device=torch.device("cpu"))
    cut = ChunkBlocks(sparse, num_earlier=0, rows=4)
    query, k = torch.zeros(1, 2, 4, 8), torch.zeros(4, 1, 8)
    with pytest.raises(EngineError, match="a layer has a soft cap of 30, which block-sparse prefill does not support"):
        SparseChunk(sparse, query, k, k, Scores(scale=1.0, softcap=30.0), cut)


def test_pages_that_do_not_fit_blocks_are_refused() -> None:
    with pytest.raises(ConfigError, match="sparse_block_size is 64 and the page size is 48; one must be a multiple"):
        SparsePrefill(ALL, (), block_sparse_reference, page_size=48, device=torch.device("cpu"))


@pytest.mark.parametrize("page_size", [16, 256])
def test_kernels_are_compiled_for_all_kinds_of_spans(page_size: int) -> None:
    """Here by the reference: the shapes fit, and nothing is counted."""
    workspaces = sparse_prefill_workspaces(ALL, num_heads=4, chunk_tokens=16, max_seq_len=65)
    sparse = SparsePrefill(ALL, workspaces, block_sparse_reference, page_size=page_size, device=torch.device("cpu"))
    sparse.compile_kernels(heads=(4, 2), dim=16, value_dim=16, dtypes=(torch.float32, torch.bfloat16))
    sparse.end_step()
    assert sparse.read_counts().selected_blocks == 0


def test_buffers_that_hold_no_block_are_refused(demo_dir: Path) -> None:
    engine = sparse_engine(demo_dir, Shard(page_size=4), ALL)
    with pytest.raises(ConfigError, match=r"block_bytes holds 60 tokens of a layer; .* must hold 64, at least"):
        Hosted(engine, {"a": 64}, pages_per_block=15)
