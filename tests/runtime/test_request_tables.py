"""Page tables on a device, and their way there: here to host memory, in tests/gpu to a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from prefill_node.scheduler import page_needs
from transfer.copy.request_tables import RequestTables, TableEntries
from transfer.errors import LayoutError
from transfer.layer_groups import NO_PAGE, layer_groups
from transfer.layout import DType, KVLayout, LayerKind, LayerSpec
from transfer.pool.page_allocator import GroupAllocator

PAGE_SIZE = 4


def entries_of(num_pages: int, *, room: int = 32) -> tuple[TableEntries, np.ndarray[tuple[int], np.dtype[np.int64]]]:
    array = np.full(room, -7, dtype=np.int64)
    return TableEntries(array, num_pages=num_pages, request_id="a"), array


def test_each_entry_is_taken_in_once() -> None:
    entries, array = entries_of(8)
    entries.update([NO_PAGE, 7, 0])
    entries.update([NO_PAGE, 5, 0, 2])  # only what is new is read
    entries.update([NO_PAGE, 7, 0, 2])
    assert (entries.num_known, array[:5].tolist()) == (4, [NO_PAGE, 7, 0, 2, -7])
    entries.check(1, 4)
    with pytest.raises(LayoutError, match=r"entry 0 in the page table of request a is no page; \[0, 4\) are needed"):
        entries.check(0, 4)
    with pytest.raises(LayoutError, match="the page table of request a has 4 entries; the piece takes 5"):
        entries.check(1, 5)


@pytest.mark.parametrize(
    ("added", "problem"),
    [
        ([1, 7], "has page 7 twice"),
        ([1, 8], r"has page 8; the pool's are \[0, 8\)"),
        ([-2, 1], r"has page -2; the pool's are \[0, 8\)"),
    ],
)
def test_pages_are_of_the_pool_and_come_once_each(added: Sequence[int], problem: str) -> None:
    entries, _ = entries_of(8)
    known = [NO_PAGE, 7, 0]
    entries.update(known)
    with pytest.raises(LayoutError, match=f"the page table of request a {problem}"):
        entries.update([*known, *added])
    entries.update([*known, 1, 3, 4])  # nothing of what was refused was taken in
    assert entries.num_known == 6


def test_pages_that_a_window_has_passed_may_come_again() -> None:
    entries, array = entries_of(8)
    entries.update([3, 4, 5])
    entries.update([NO_PAGE, NO_PAGE, 5, 3])
    assert array[:4].tolist() == [3, 4, 5, 3], "what may be on its way to a device stays"
    with pytest.raises(LayoutError, match="entry 1 in the page table of request a is no page"):
        entries.check(1, 4)
    with pytest.raises(LayoutError, match="has page 5 twice"):
        entries.update([NO_PAGE, NO_PAGE, 5, 3, 4, 5])
    entries.update([NO_PAGE, NO_PAGE, NO_PAGE, NO_PAGE, 5, 3])
    assert array[:6].tolist() == [3, 4, 5, 3, 5, 3]
    entries.check(4, 6)
    with pytest.raises(LayoutError, match="entry 3 in the page table of request a is no page"):
        entries.check(3, 6)


def test_nothing_of_a_table_is_left_to_the_next_one() -> None:
    entries, array = entries_of(8)
    entries.update([NO_PAGE, 7, 3, NO_PAGE])
    entries.clear()
    array.fill(5)  # it is others' from now on
    entries.begin(np.zeros(4, dtype=np.int64), "b")
    with pytest.raises(LayoutError, match="the page table of request b has 0 entries; the piece takes 1"):
        entries.check(0, 1)
    entries.update([3, 7, 5])
    entries.check(0, 3)
    with pytest.raises(LayoutError, match="request b has page 5 twice"):
        entries.update([3, 7, 5, 5])


def tables_on_host(**options: Any) -> RequestTables:
    return RequestTables(torch.device("cpu"), 3000, **options)


def test_a_table_grows_while_its_pieces_are_under_way() -> None:
    tables = tables_on_host()
    pages = torch.randperm(3000, generator=torch.Generator().manual_seed(3)).tolist()
    before = tables.cover("a", pages[:256], 0, 256).use()
    grown = tables.cover("a", pages[:257], 256, 257)
    other = tables.cover("b", pages[:300], 0, 300).use()
    assert before.tolist() == pages[:256], "copies that are queued read it"
    assert grown.use()[:257].tolist() == pages[:257] and other[:300].tolist() == pages[:300]
    assert len({before.data_ptr(), grown.use().data_ptr(), other.data_ptr()}) == 3
    assert grown is tables.cover("a", pages[:2000], 0, 2000)
    assert (len(grown.use()), grown.use()[:2000].tolist()) == (2048, pages[:2000])
    tables.forget("a")
    found = [tables.cover(f"again {number}", pages[:100], 0, 100).use() for number in range(2)]
    assert found[0].data_ptr() == before.data_ptr() != found[1].data_ptr()


@pytest.mark.parametrize("num_tokens", range(121, 201, 9))
@pytest.mark.parametrize("chunk_tokens", [4, 6, 8, 16])
def test_a_prompt_is_gathered_from_a_pool_that_has_only_its_own_pages(chunk_tokens: int, num_tokens: int) -> None:
    """In the order of a prefill rank: bind the pages of the next step, gather a chunk, end its step."""
    window = LayerSpec(kind=LayerKind.SLIDING_WINDOW, num_kv_heads=1, k_head_dim=8, v_head_dim=8, window_tokens=40)
    (group,) = groups = layer_groups(KVLayout(layers=(window,), dtype=DType.FLOAT16))
    needs = page_needs(groups, PAGE_SIZE, chunk_tokens=chunk_tokens)
    (count,) = counts = needs.peak(num_tokens).by_group
    allocator = GroupAllocator(needs, counts)
    assert allocator.reserve("a", num_tokens)
    entries, array = entries_of(count, room=num_tokens)
    first_token = group.first_travelling_token(num_tokens)
    ends = [*range(chunk_tokens, num_tokens, chunk_tokens), num_tokens]
    for end, next_end in zip(ends, [*ends[1:], num_tokens], strict=True):
        (table,) = allocator.cover("a", next_end)
        if end > first_token:
            entries.update(table)
            entries.check(max(end - chunk_tokens, first_token) // PAGE_SIZE, -(-end // PAGE_SIZE))
            passed = list(table).count(NO_PAGE)
            assert array[passed : len(table)].tolist() == list(table[passed:])
        allocator.advance("a", end, kept_from=num_tokens)
