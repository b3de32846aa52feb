"""Tiered decode as on a GPU, under Triton's interpreter; run by test_under_interpreter.py."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.cluster.engines.device_decode_under_interpreter import relaunch_graphs
from tests.embedded_engine.decode_cases import assert_merges
from tests.embedded_engine.steps import Directory, PageBook, Prompts, make_engine, prefill_all
from tests.embedded_engine.tiers import ALL_BUT_NEWEST, HALF, HostEnd, StoredPages, Tiers, full_group, host_pool_of, largest_slice
from transfer.layout import DType, Shard, TokenOrder

pytestmark = pytest.mark.filterwarnings("ignore:(overflow|invalid value|divide by zero) encountered:RuntimeWarning")

LENGTHS = {"a": 33, "b": 5, "c": 17, "d": 15}
ENDS: dict[str, HostEnd] = {"a": ALL_BUT_NEWEST, "c": HALF, "d": ALL_BUT_NEWEST}  # b lies between them, without any
NUM_TOKENS = 4


def tokens_by(
    directory: Path,
    prompts: Prompts,
    shard: Shard,
    *,
    has_kernels: bool,
    pages_per_block: int = 3,
    names: Sequence[str] = tuple(LENGTHS),
    batch_sizes: Sequence[int] = (),
    replayed: Sequence[int] = (),
    stored_pages: int = 0,
) -> dict[str, list[int]]:
    lengths = {name: LENGTHS[name] for name in names}
    with pytest.MonkeyPatch.context() as patch:
        graphs = relaunch_graphs(patch)
        engine = make_engine(
            directory,
            shard,
            num_tokens=160,
            num_states=4,
            max_seq_len=64,
            max_running_requests=4,
            cuda_graph_batch_sizes=batch_sizes,
            has_host_pages=True,
            has_decode_kernels=has_kernels,
        )
        host = host_pool_of(engine, 80 // shard.page_size + 8)
        block_bytes = pages_per_block * largest_slice(host, full_group(engine.pool.groups))
        group = full_group(engine.pool.groups)
        stored = StoredPages(host, group, pages_per_block=stored_pages) if stored_pages else None
        engine.use_host_pool(host, block_bytes=block_bytes, stored=stored)
    book = PageBook.of(engine, {name: length + NUM_TOKENS for name, length in lengths.items()})
    assert engine.host_block_bytes == (2 * block_bytes if has_kernels else 0)
    first = prefill_all(engine, {name: prompts[length] for name, length in lengths.items()}, book)
    ends = {name: end for name, end in ENDS.items() if name in names}
    found = Tiers(engine, host, book, ends, stored).decode(first, lengths, NUM_TOKENS)
    if graphs:
        assert not graphs[0].replayed, "every step of these has host pages"
        assert graphs[-1].replayed == list(replayed), "those over host memory were captured last"
    return found


@pytest.mark.parametrize("family", ["deepseek_v3", "gemma2", "gpt_oss", "qwen3_next"])
def test_tokens_are_those_of_the_cpu_s_path(family_dir: Directory, prompts: Prompts, family: str) -> None:
    shard = Shard(page_size=4)
    found = tokens_by(family_dir(family), prompts, shard, has_kernels=True)
    assert found == tokens_by(family_dir(family), prompts, shard, has_kernels=False)


@pytest.mark.parametrize("family", ["deepseek_v3", "gpt_oss"])
def test_blocks_in_the_store_follow_the_pages_in_host_memory(family_dir: Directory, prompts: Prompts, family: str) -> None:
    shard = Shard(page_size=4)
    found = tokens_by(family_dir(family), prompts, shard, has_kernels=True, stored_pages=2, batch_sizes=(4,))
    assert found == tokens_by(family_dir(family), prompts, shard, has_kernels=False)


@pytest.mark.parametrize(
    ("shard", "pages_per_block", "names"),
    [
        (Shard(page_size=16, order=TokenOrder.HND), 1, ("a", "b", "c")),
        (Shard(page_size=4, order=TokenOrder.HND), 20, tuple(LENGTHS)),
        (Shard(page_size=1, dtype=DType.FLOAT16), 7, ("b", "c", "d")),
    ],
    ids=["HND, a page a block", "HND, all in one block", "narrower pool, pages of 1"],
)
def test_pools_and_blocks_of_other_kinds(
    qwen_dir: Path, prompts: Prompts, shard: Shard, pages_per_block: int, names: Sequence[str]
) -> None:
    what: Any = {"pages_per_block": pages_per_block, "names": names}
    found = tokens_by(qwen_dir, prompts, shard, has_kernels=True, **what)
    assert found == tokens_by(qwen_dir, prompts, shard, has_kernels=False, **what)


@pytest.mark.parametrize(
    ("family", "names", "pages_per_block", "replayed"),
    [
        pytest.param("glm", ("b", "c", "a"), 12, [4] * (NUM_TOKENS - 1), id="replayed, padded"),
        pytest.param("deepseek_v3", ("c", "a"), 12, [2] * (NUM_TOKENS - 1), id="replayed, latents"),
        pytest.param("gpt_oss", ("a", "b"), 12, [2] * (NUM_TOKENS - 1), id="replayed, with windows and sinks"),
        pytest.param("glm", ("b", "c", "a"), 3, [], id="more than both buffers hold, padded and launched"),
    ],
)
def test_steps_whose_host_pages_fit_the_buffers_are_replayed(
    family_dir: Directory, prompts: Prompts, family: str, names: Sequence[str], pages_per_block: int, replayed: Sequence[int]
) -> None:
    """Pages of more than one row in a block, rows without any, and tables that change from step to step."""
    what: Any = {"names": names, "pages_per_block": pages_per_block}
    shard = Shard(page_size=4)
    found = tokens_by(family_dir(family), prompts, shard, has_kernels=True, batch_sizes=(2, 4), replayed=replayed, **what)
    assert found == tokens_by(family_dir(family), prompts, shard, has_kernels=False, **what)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_partial_results_are_merged_as_by_the_reference(dtype: torch.dtype) -> None:
    assert_merges(dtype)
