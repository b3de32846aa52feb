"""The compiled kernel on a real GPU, against the reference on the same device."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings

from tests.kernels.kernel_cases import Case, assert_agrees, cases
from transfer.kernels import head_slice_copier
from transfer.kv_pool import PagedKVPool, as_words
from transfer.layout import DType, HeadSlice, KVLayout, Route, Shard, Span, TokenOrder, wire_buffers

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA: this torch sees no device"),
]

FLOATS = [dtype for dtype in DType if dtype is not DType.INT8]


@pytest.mark.timeout(900)
@settings(max_examples=60)
@given(case=cases(max_page_size=256, max_pages=12, max_dim=40))
def test_agrees_with_the_reference(case: Case) -> None:
    from transfer.kernels.head_slice import TritonCopier

    assert_agrees(case, TritonCopier, "cuda")


@pytest.mark.parametrize("order", list(TokenOrder))
@pytest.mark.parametrize("head_dim", [64, 80, 128, 192, 576])
@pytest.mark.parametrize("page_size", [1, 16, 48, 256])
def test_shapes_that_engines_use(page_size: int, head_dim: int, order: TokenOrder) -> None:
    from transfer.kernels.head_slice import TritonCopier

    assert_agrees(shape(DType.BFLOAT16, DType.BFLOAT16, page_size, head_dim, order), TritonCopier, "cuda")


@pytest.mark.parametrize("source", FLOATS)
@pytest.mark.parametrize("target", FLOATS)
def test_conversions(source: DType, target: DType) -> None:
    from transfer.kernels.head_slice import TritonCopier

    assert_agrees(shape(source, target, 16, 128, TokenOrder.NHD), TritonCopier, "cuda")


def shape(source: DType, target: DType, page_size: int, head_dim: int, order: TokenOrder) -> Case:
    num_pages = -(-700 // page_size)
    pages = torch.randperm(num_pages, generator=torch.Generator().manual_seed(8)).tolist()
    return Case(
        layout=KVLayout.uniform(num_layers=3, num_kv_heads=4, head_dim=head_dim, dtype=source),
        shard=Shard(page_size=page_size, order=order),
        num_pages=num_pages,
        heads=Span(begin=1, end=3),
        wire_dtype=target,
        pages=tuple(pages),
        tokens=Span(begin=5, end=691),
        first_token=0,
        num_tokens=691,
    )


def test_offsets_beyond_32_bits() -> None:
    """A buffer of 6 GiB (more than 2**32 elements), its last pages in use, and a wire offset that the rows cross 2**32 with."""
    layout = KVLayout.uniform(num_layers=1, num_kv_heads=8, head_dim=128, v_head_dim=0, dtype=DType.INT8)
    num_pages = (6 << 30) // (64 * 1024)
    pool = PagedKVPool(layout=layout, shard=Shard(page_size=64), num_pages=num_pages, device="cuda")
    pages = torch.arange(num_pages - 1, -1, -1)
    pool.buffer(0, is_v=False).view(-1, 1024)[:, 0] = torch.arange(num_pages * 64, device="cuda").to(torch.int8)
    tokens, layers = Span(begin=0, end=num_pages * 64), Span(begin=0, end=1)
    heads = HeadSlice(source_start=0, target_start=0, count=8)
    route = Route(index=0, prefill_rank=0, decode_rank=0, layers=layers, heads=heads)
    buffers = wire_buffers(layout, route, tokens=tokens, layers=layers, num_tokens=tokens.end, dtype=DType.INT8)
    out = torch.zeros(6 << 30, dtype=torch.uint8, device="cuda")
    copier = head_slice_copier(pool, heads=Span(begin=0, end=8), wire_dtype=DType.INT8)
    copier.gather(pages, buffers, out)
    found, source = out.view(num_pages, 64, 1024), as_words(pool.buffer(0, is_v=False)).view(num_pages, 64, 1024)
    assert torch.equal(found[:, :, 0], source.flip(0)[:, :, 0])
    copier.scatter(torch.arange(num_pages), buffers, out)
    assert torch.equal(source, found)


def test_runs_behind_the_current_stream() -> None:
    """No synchronisation inside: a gather queued behind a slow fill of the pool sees what was filled."""
    case = shape(DType.BFLOAT16, DType.BFLOAT16, 16, 128, TokenOrder.NHD)
    pool, out = case.pool("cuda", seed=9), case.wire("cuda")
    copier = head_slice_copier(pool, heads=case.heads, wire_dtype=case.wire_dtype)
    table = case.table("cuda")
    copier.gather(table, case.buffers, out)
    torch.cuda.synchronize()
    stream, event = torch.cuda.Stream(), torch.cuda.Event()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(200_000_000)
        for layer in range(3):
            pool.buffer(layer, is_v=False).fill_(3.0)
            pool.buffer(layer, is_v=True).fill_(3.0)
        copier.gather(table, case.buffers, out)
        event.record()
    assert not event.query()
    event.synchronize()
    payload = out[: case.buffers[-1].offset_bytes + case.buffers[-1].num_bytes]
    assert bool((payload.view(torch.bfloat16) == 3.0).all())
