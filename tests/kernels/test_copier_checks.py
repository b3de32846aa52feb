"""Everything an implementation assumes is refused by name when it does not hold."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from transfer.errors import LayoutError, LocalProtocolError
from transfer.kernels import HeadSliceCopier, head_slice_copier
from transfer.kv_pool import PagedKVPool
from transfer.layout import DType, KVLayout, LayerSpec, Shard, Span, WireBuffer

LAYOUT = KVLayout(
    layers=(LayerSpec(num_kv_heads=4, k_head_dim=4, v_head_dim=2), LayerSpec(num_kv_heads=1, k_head_dim=4, v_head_dim=0)),
    dtype=DType.BFLOAT16,
)
BUFFER = WireBuffer(layer=0, is_v=False, tokens=Span(begin=4, end=9), row_bytes=2 * 4 * 2, offset_bytes=0)
HEADS = Span(begin=1, end=3)
PAGES = torch.tensor([5, 1, 3])
OUT = torch.zeros(80, dtype=torch.uint8)


def copier(heads: Span = HEADS, wire_dtype: DType = DType.BFLOAT16) -> HeadSliceCopier:
    pool = PagedKVPool(layout=LAYOUT, shard=Shard(page_size=3), num_pages=6)
    return head_slice_copier(pool, heads=heads, wire_dtype=wire_dtype)


def test_the_call_that_the_others_vary_is_accepted() -> None:
    copier().gather(PAGES, [BUFFER], OUT)
    copier().scatter(PAGES.int(), [BUFFER], OUT, first_token=4)
    copier().gather(torch.empty(0, dtype=torch.int64), [], OUT)


@pytest.mark.parametrize(
    ("out", "match"),
    [
        (OUT.view(torch.int8), "must be contiguous uint8"),
        (OUT.view(8, 10), "must be contiguous uint8"),
        (torch.zeros(160, dtype=torch.uint8)[::2], "must be contiguous uint8"),
        (OUT.to("meta"), "on meta"),
        (torch.zeros(90, dtype=torch.uint8)[1:], "is not aligned to bfloat16"),
        (OUT[:79], r"wire bytes \[0, 80\); must be inside \[0, 79\)"),
    ],
)
def test_wire_tensors(out: Tensor, match: str) -> None:
    for move in (copier().gather, copier().scatter):
        with pytest.raises(LocalProtocolError, match=match):
            move(PAGES, [BUFFER], out)


@pytest.mark.parametrize(
    ("pages", "match"),
    [
        (torch.tensor([5, 1, 6]), r"pages 1 to 6; the pool's are \[0, 6\)"),
        (torch.tensor([5, 1, -1]), "pages -1 to 5"),
        (torch.tensor([5.0, 1, 3]), "must be int64 or int32"),
        (torch.tensor([[5, 1, 3]]), "must be int64 or int32"),
        (torch.tensor([5, 1]), "2 pages of 3 tokens from token 0; tokens go up to 9"),
        (PAGES.to("meta"), "page table is on meta"),
    ],
)
def test_page_tables(pages: Tensor, match: str) -> None:
    for move in (copier().gather, copier().scatter):
        with pytest.raises(LocalProtocolError, match=match):
            move(pages, [BUFFER], OUT)


@pytest.mark.parametrize(
    ("buffer", "error", "match"),
    [
        (replace(BUFFER, layer=2), LayoutError, "layer 2 K: no such buffer"),
        (replace(BUFFER, layer=1), LayoutError, "layer 1 K: no such buffer with heads"),
        (replace(BUFFER, is_v=True), LayoutError, "row_bytes 16; 8 with these heads"),
        (replace(BUFFER, row_bytes=8), LayoutError, "row_bytes 8; 16 with these heads in bfloat16"),
        (replace(BUFFER, offset_bytes=-2), LocalProtocolError, "wire bytes"),
        (replace(BUFFER, offset_bytes=1, tokens=Span(begin=5, end=9)), LocalProtocolError, "on bfloat16 elements"),
    ],
)
def test_buffers(buffer: WireBuffer, error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        copier().gather(PAGES, [buffer], OUT)


def test_tokens_before_the_table_are_refused() -> None:
    with pytest.raises(LocalProtocolError, match="begins at token 4, before first_token 5"):
        copier().gather(PAGES, [BUFFER], OUT, first_token=5)


def test_heads_and_dtypes_are_checked_when_it_is_made() -> None:
    with pytest.raises(LayoutError, match=r"heads \[3, 5\) leave the pool; its layers have at most 4"):
        copier(Span(begin=3, end=5))
    with pytest.raises(LayoutError, match="is empty"):
        copier(Span(begin=1, end=1))
    with pytest.raises(LayoutError, match="wire is int8"):
        copier(wire_dtype=DType.INT8)
