"""The Triton kernel under its interpreter; run by test_triton.py in a process that sets TRITON_INTERPRET=1."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings

from node_runtime import piece_copier
from tests.kernels.kernel_cases import Case, assert_agrees, cases
from tests.runtime.test_piece_copier import carry_over
from transfer.chunk import ChunkPlan
from transfer.kernels.head_slice import TritonCopier
from transfer.kernels.reference import ReferenceCopier
from transfer.kv_pool import TORCH_DTYPES, LayerBuffers, PagedKVPool, as_words
from transfer.layout import DType, HeadSlice, KVLayout, Route, Shard, Span, TokenOrder, WireBuffer, wire_buffers

pytestmark = pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered:RuntimeWarning")


@settings(max_examples=120)
@given(case=cases(max_page_size=20, max_pages=5, max_dim=12))
def test_agrees_with_the_reference(case: Case) -> None:
    assert_agrees(case, TritonCopier)


@settings(max_examples=6)
@given(case=cases(max_page_size=256, max_pages=2, max_dim=3))
def test_agrees_on_large_pages(case: Case) -> None:
    assert_agrees(case, TritonCopier)


@pytest.mark.parametrize("order", list(TokenOrder))
@pytest.mark.parametrize("head_dim", [513, 1100 * 8])
def test_rows_wider_than_a_tile(order: TokenOrder, head_dim: int) -> None:
    layout = KVLayout.uniform(num_layers=1, num_kv_heads=2, head_dim=head_dim, dtype=DType.INT8)
    assert_agrees(
        Case(
            layout=layout,
            shard=Shard(page_size=2, order=order),
            num_pages=2,
            heads=Span(begin=0, end=2),
            wire_dtype=DType.INT8,
            pages=(1, 0),
            tokens=Span(begin=1, end=4),
            first_token=0,
            num_tokens=4,
        ),
        TritonCopier,
    )


FLOATS = [dtype for dtype in DType if dtype is not DType.INT8]


@pytest.mark.parametrize("source", FLOATS)
@pytest.mark.parametrize("target", FLOATS)
def test_conversions_are_exact_for_every_pattern(source: DType, target: DType) -> None:
    """All bit patterns of the 8- and 16-bit types, 65,536 random ones of float32; NaN must stay NaN."""
    bits = torch.randint(-(2**31), 2**31, (65536,), generator=torch.Generator().manual_seed(6)).to(torch.int32)
    values = {
        1: torch.arange(65536).to(torch.uint8).view(TORCH_DTYPES[source]) if source.num_bytes == 1 else None,
        2: torch.arange(-32768, 32768).to(torch.int16).view(TORCH_DTYPES[source]) if source.num_bytes == 2 else None,
        4: bits.view(torch.float32) if source.num_bytes == 4 else None,
    }[source.num_bytes]
    assert values is not None
    if source is DType.FLOAT32:  # random bits are mostly huge or tiny: add numbers around the limits of the narrow types
        near = torch.randn(32768, generator=torch.Generator().manual_seed(7)) * 2.0 ** torch.arange(-14, 18).repeat(1024)
        values = torch.cat([values[:32768], near])
    layout = KVLayout.uniform(num_layers=1, num_kv_heads=1, head_dim=1024, v_head_dim=0, dtype=source)
    pool = PagedKVPool(layout=layout, shard=Shard(page_size=64), num_pages=1)
    as_words(pool.buffer(0, is_v=False)).view(-1).copy_(as_words(values))
    tokens = Span(begin=0, end=64)
    buffer = WireBuffer(layer=0, is_v=False, tokens=tokens, row_bytes=1024 * target.num_bytes, offset_bytes=0)
    wire, expected = (torch.zeros(65536 * target.num_bytes, dtype=torch.uint8) for _ in range(2))
    for implementation, out in ((TritonCopier, wire), (ReferenceCopier, expected)):
        implementation(pool, heads=Span(begin=0, end=1), wire_dtype=target).gather(torch.tensor([0]), [buffer], out)
    found, right = wire.view(TORCH_DTYPES[target]), expected.view(TORCH_DTYPES[target])
    is_nan = right.float().isnan()
    assert torch.equal(found.float().isnan(), is_nan)
    assert torch.equal(as_words(found)[~is_nan], as_words(right)[~is_nan])


def test_pages_outside_the_pool_are_left_out() -> None:
    """A table on a GPU is not checked on the host: the kernel must not follow it out of the pool."""
    layout = KVLayout.uniform(num_layers=1, num_kv_heads=1, head_dim=8, v_head_dim=0, dtype=DType.INT8)
    storage = torch.full((6, 2, 1, 8), 7, dtype=torch.int8)
    pool = PagedKVPool(layout=layout, shard=Shard(page_size=2), num_pages=2, buffers=[LayerBuffers(k=storage[2:4], v=None)])
    copier = TritonCopier(pool, heads=Span(begin=0, end=1), wire_dtype=DType.INT8)
    buffer = WireBuffer(layer=0, is_v=False, tokens=Span(begin=0, end=6), row_bytes=8, offset_bytes=0)
    job = copier._checked(torch.tensor([0, 1, 0]), [buffer], torch.full((48,), 9, dtype=torch.uint8), 0)
    job.pages.copy_(torch.tensor([2, 1, -1]))
    copier._scatter(job)
    assert storage[:3].eq(7).all() and storage[4:].eq(7).all() and storage[3].eq(9).all()
    job.wire.fill_(1)
    copier._gather(job)
    assert job.wire.view(3, 16).tolist() == [[1] * 16, [9] * 16, [1] * 16]


def test_equally_shaped_buffers_share_a_launch() -> None:
    def num_launches(layout: KVLayout) -> int:
        layers = Span(begin=0, end=layout.num_layers)
        pool = PagedKVPool(layout=layout, shard=Shard(page_size=2), num_pages=2)
        copier = TritonCopier(pool, heads=Span(begin=0, end=2), wire_dtype=layout.dtype)
        heads = HeadSlice(source_start=0, target_start=0, count=2)
        route = Route(index=0, prefill_rank=0, decode_rank=0, layers=layers, heads=heads)
        tokens = Span(begin=0, end=4)
        buffers = wire_buffers(layout, route, tokens=tokens, layers=layers, num_tokens=4, dtype=layout.dtype)
        out = torch.zeros(buffers[-1].offset_bytes + buffers[-1].num_bytes, dtype=torch.uint8)
        return len(list(copier._launches(copier._checked(torch.tensor([1, 0]), buffers, out, 0))))

    shape = {"num_layers": 40, "num_kv_heads": 2, "dtype": DType.FLOAT16}
    assert num_launches(KVLayout.uniform(head_dim=8, **shape)) == 1
    assert num_launches(KVLayout.uniform(head_dim=8, v_head_dim=4, **shape)) == 2


@pytest.mark.parametrize("dtype", [None, DType.FLOAT8_E4M3])
def test_a_prompt_of_all_kinds_of_layers_is_carried_over(dtype: DType | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Full attention, windows, a latent and states, each from and into its own pages; the states stay as they are."""
    monkeypatch.setattr(piece_copier, "head_slice_copier", TritonCopier)
    decode = Shard(tp_size=2, page_size=4, order=TokenOrder.HND, dtype=dtype)
    carry_over(Shard(tp_size=4, page_size=3), decode, ChunkPlan(chunk_tokens=8, layers_per_group=3), 25)
