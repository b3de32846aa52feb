"""Everything an implementation assumes is refused by name when it does not hold."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from transfer.copy import HeadSliceCopier, WireMemory, head_slice_copier
from transfer.errors import LayoutError
from transfer.layer_groups import NO_PAGE
from transfer.layout import DType, KVLayout, LayerSpec, Range, Shard, WireBuffer
from transfer.pool.kv_pool import PagedKVPool

LAYOUT = KVLayout(
    layers=(LayerSpec(num_kv_heads=4, k_head_dim=4, v_head_dim=2), LayerSpec(num_kv_heads=1, k_head_dim=4, v_head_dim=0)),
    dtype=DType.BFLOAT16,
)
BUFFER = WireBuffer(layer=0, is_v=False, tokens=Range(begin=4, end=9), row_bytes=2 * 4 * 2, offset_bytes=0)
HEADS = Range(begin=1, end=3)
PAGES = torch.tensor([5, 1, 3])
OUT = torch.zeros(80, dtype=torch.uint8)


def copier(
    heads: Range = HEADS, wire_dtype: DType = DType.BFLOAT16, scales: dict[tuple[int, bool], float] | None = None
) -> HeadSliceCopier:
    pool = PagedKVPool(layout=LAYOUT, shard=Shard(page_size=3), num_pages=6)
    return head_slice_copier(pool, heads=heads, wire_dtype=wire_dtype, scales=scales)


def test_the_call_that_the_others_vary_is_accepted() -> None:
    plan = copier().plan([BUFFER])
    assert (plan.num_wire_bytes, plan.num_moved_bytes, plan.used_pages) == (80, 80, Range(begin=1, end=3))
    plan.gather(PAGES, OUT)
    plan.scatter(torch.tensor([7, -1, NO_PAGE, *PAGES[1:]]), OUT, first_page=2)  # a window has passed the first page
    copier().plan([]).gather(torch.empty(0, dtype=torch.int64), OUT)


@pytest.mark.parametrize(
    ("wire", "match"),
    [
        (OUT.view(torch.int8), "must be contiguous uint8"),
        (torch.zeros(90, dtype=torch.uint8)[1:], "must be aligned to bfloat16"),
        (OUT[:79], "has 79 bytes; the buffers take 80"),
    ],
)
def test_wires(wire: WireMemory, match: str) -> None:
    plan = copier().plan([BUFFER])
    with pytest.raises(LayoutError, match=f"out .*{match}"):
        plan.gather(PAGES, wire)
    with pytest.raises(LayoutError, match=f"source .*{match}"):
        plan.scatter(PAGES, wire)


@pytest.mark.parametrize(
    ("pages", "match"),
    [
        (torch.tensor([5, 1, 6]), r"entries 1 to 6; the pool's are \[0, 6\)"),
        (torch.tensor([5, 1, 1]), "names page 1 twice"),
        (torch.tensor([5, 1]), "first_page is 0 with 2 entries in pages; the buffers take 3"),
    ],
)
def test_page_tables(pages: Tensor, match: str) -> None:
    plan = copier().plan([BUFFER])
    for move in (plan.gather, plan.scatter):
        with pytest.raises(LayoutError, match=match):
            move(pages, OUT)


@pytest.mark.parametrize(
    ("buffer", "match"),
    [
        (replace(BUFFER, layer=2), "layer 2 K: no such buffer"),
        (replace(BUFFER, offset_bytes=1), "offset_bytes 1; must be on bfloat16 elements"),
    ],
)
def test_buffers(buffer: WireBuffer, match: str) -> None:
    with pytest.raises(LayoutError, match=match):
        copier().plan([buffer])


def test_heads_dtypes_and_scales_are_checked_when_it_is_made() -> None:
    with pytest.raises(LayoutError, match=r"heads \[3, 5\) leave the pool; its layers have at most 4"):
        copier(Range(begin=3, end=5))
    with pytest.raises(LayoutError, match="is empty"):
        copier(Range(begin=1, end=1))
    with pytest.raises(LayoutError, match="wire is int8"):
        copier(wire_dtype=DType.INT8)
    with pytest.raises(LayoutError, match=r"scales\[0, True\] is -1.0; must be between"):
        copier(wire_dtype=DType.FLOAT8_E4M3, scales={(0, True): -1.0})
