"""Tiered decode as on a GPU, under Triton's interpreter; run by test_under_interpreter.py."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from embedded_engine import device_decode
from embedded_engine import engine as engine_module
from embedded_engine.engine import EmbeddedEngine
from embedded_engine.kernels.merge_partial import merge_partial
from embedded_engine.kernels.reference import reference_merge_partial
from embedded_engine.model_files import read_model_files
from embedded_engine.tiered_decode import LoadedBlocks
from tests.engine.device_decode_under_interpreter import Relaunched
from tests.engine.steps import PageBook, pages_for, prefill_all
from tests.engine.tiers import ALL_BUT_NEWEST, HALF, HostEnd, Tiers, full_group, host_pool_of, largest_slice
from transfer.errors import LayoutError
from transfer.layer_groups import layer_groups
from transfer.layout import DType, Shard, TokenOrder

pytestmark = pytest.mark.filterwarnings("ignore:(overflow|invalid value|divide by zero) encountered:RuntimeWarning")

Directory = Callable[[str], Path]
Prompts = dict[int, tuple[int, ...]]
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
) -> dict[str, list[int]]:
    lengths = {name: LENGTHS[name] for name in names}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine_module, "_has_decode_kernels", lambda device: has_kernels)
        patch.setattr(device_decode, "DecodeGraphs", Relaunched)
        groups = layer_groups(read_model_files(directory).layout())
        engine = EmbeddedEngine(
            directory,
            shard=shard,
            num_pages=pages_for(groups, 160 // shard.page_size, num_states=4),
            max_seq_len=64,
            max_running_requests=4,
            cuda_graph_batch_sizes=batch_sizes,
        )
    book = PageBook.of(engine, {name: length + NUM_TOKENS for name, length in lengths.items()})
    host = host_pool_of(engine, 80 // shard.page_size + 8)
    group = full_group(engine.pool.groups)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(device_decode, "DecodeGraphs", Relaunched)
        engine.use_host_pool(host, block_bytes=pages_per_block * largest_slice(host, group))
    assert engine.host_block_bytes == (2 * pages_per_block * largest_slice(host, group) if has_kernels else 0)
    first = prefill_all(engine, {name: prompts[length] for name, length in lengths.items()}, book)
    ends = {name: end for name, end in ENDS.items() if name in names}
    found = Tiers(engine, host, book, ends).decode(first, lengths, NUM_TOKENS)
    if batch_sizes:
        assert engine._decoder is not None
        graphs: list[Any] = [engine._decoder._graphs, engine._decoder._tiered_graphs]
        assert not graphs[0].replayed, "every step of these has host pages"
        assert graphs[1].replayed == list(replayed)
    return found


@pytest.mark.parametrize(
    "family", ["deepseek_v3", *(pytest.param(name, marks=pytest.mark.slow) for name in ("gemma2", "gpt_oss", "qwen3_next"))]
)
def test_tokens_are_those_of_the_cpu_s_path(family_dir: Directory, prompts: Prompts, family: str) -> None:
    shard = Shard(page_size=4)
    found = tokens_by(family_dir(family), prompts, shard, has_kernels=True)
    assert found == tokens_by(family_dir(family), prompts, shard, has_kernels=False)


@pytest.mark.parametrize(
    ("shard", "pages_per_block", "names"),
    [
        (Shard(page_size=16, order=TokenOrder.HND), 1, ("a", "b", "c")),
        pytest.param(Shard(page_size=4, order=TokenOrder.HND), 20, tuple(LENGTHS), marks=pytest.mark.slow),
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
        pytest.param(
            "gpt_oss", ("a", "b"), 12, [2] * (NUM_TOKENS - 1), id="replayed, with windows and sinks", marks=pytest.mark.slow
        ),
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


def test_what_is_loaded_for_a_replayed_step_stays_until_something_else_fits() -> None:
    tier: Any = SimpleNamespace(pages_per_block=3, page_size=4)
    loaded = LoadedBlocks(tier, max_rows=6, device=torch.device("cpu"))
    blocks = loaded.blocks_of(5, num_splits=1)
    assert blocks.counts is not None
    firsts, counts = (
        [one[block.first_part :][:5] for block in blocks.blocks] for one in (blocks.first_tokens, blocks.num_tokens)
    )
    long, short = (5, 6, 7, 8), (9,)
    for tables in ([long, (), short], [(0,)], [long, (), short]):
        assert loaded.load(tables)
    assert blocks.counts.tolist() == [3, 2]
    assert blocks.pages.view(2, 3)[:, :2].tolist() == [[5, 6], [8, 9]] and blocks.pages[2] == 7
    assert [one.tolist() for one in counts] == [[12, 0, 0, 0, 0], [4, 0, 4, 0, 0]]
    assert (firsts[1][0], firsts[1][2]) == (0, 4)
    before = blocks.pages.clone()
    assert not loaded.load([tuple(range(7))]), "seven pages do not fit twice three"
    assert loaded.load([long, (), short]) and torch.equal(blocks.pages, before)
    assert loaded.load([short])
    assert blocks.counts.tolist() == [1, 0] and counts[0].tolist() == [4, 0, 0, 0, 0] and not counts[1].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_partial_results_are_merged_as_by_the_reference(dtype: torch.dtype) -> None:
    """Rows of whose two parts one or both saw nothing, and one that is no number."""
    generator = torch.Generator().manual_seed(5)
    total, part = torch.randn(6, 3, 20, generator=generator), torch.randn(6, 5, 24, generator=generator).to(dtype)[:, 1:4, :20]
    lses = [torch.randn(6, 3, generator=generator) * 4 for _ in range(2)]
    lses[0][0], lses[1][1], lses[0][2], lses[1][2] = (float("-inf"),) * 4
    total[[0, 2]], lses[1][5, 1] = 0.0, float("nan")
    ours, theirs = [(total.clone(), lses[0].clone()) for _ in range(2)]
    merge_partial(*ours, part, lses[1])
    reference_merge_partial(*theirs, part, lses[1])
    for found, expected in zip(ours, theirs, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6, equal_nan=True)
    assert torch.equal(ours[0][1], total[1]) and ours[0][2].eq(0).all() and ours[0][5, 1].isnan().all()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"total": torch.zeros(2, 3, 4, dtype=torch.float16)}, "total is torch.float16"),
        ({"part": torch.zeros(2, 3, 5)}, r"part is \(2, 3, 5\), .*must be \(2, 3, 4\)"),
        ({"part": torch.zeros(2, 4, 3).transpose(1, 2)}, "its last elements adjacent"),
        ({"part_lse": torch.zeros(3, 3)}, "part_lse is"),
        ({"total_lse": torch.zeros(2, 6)[:, :3]}, "both log-sum-exps contiguous"),
    ],
)
def test_a_merge_that_does_not_fit_is_refused(changes: dict[str, Any], message: str) -> None:
    numbers, lses = torch.zeros(2, 2, 3, 4), torch.zeros(2, 2, 3)
    tensors = {"total": numbers[0], "total_lse": lses[0], "part": numbers[1], "part_lse": lses[1]}
    with pytest.raises(LayoutError, match=message):
        merge_partial(**tensors | changes)
