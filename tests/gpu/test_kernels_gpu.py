"""The compiled kernels on a real GPU, against the reference on the same device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import permutations

import pytest
import torch
from hypothesis import given, settings

from tests.gpu.busy import occupy
from tests.kernels.kernel_cases import Case, assert_agrees, cases
from transfer.copy import Kernels, add_digest, head_slice_copier
from transfer.copy.request_tables import RequestTables
from transfer.copy.torch_copy import TorchCopier, words_sum
from transfer.layout import DType, HeadSlice, KVLayout, Range, Route, Shard, TokenOrder, WireBuffer, wire_buffers
from transfer.pool.kv_pool import TORCH_DTYPES, PagedKVPool, as_words

FLOATS = [dtype for dtype in DType if dtype is not DType.INT8]


@contextmanager
def nothing_waits() -> Iterator[None]:
    """What makes the host wait for the device raises inside."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.timeout(900)
@settings(max_examples=60)
@given(case=cases(max_page_size=256, max_pages=12, max_dim=40))
def test_agrees_with_the_reference(case: Case) -> None:
    from transfer.copy.head_slice import TritonCopier

    assert_agrees(case, TritonCopier, "cuda", has_kernels=True)


@pytest.mark.parametrize("order", list(TokenOrder))
@pytest.mark.parametrize("head_dim", [64, 80, 128, 192, 576])
@pytest.mark.parametrize("page_size", [1, 16, 48, 256])
def test_shapes_that_engines_use(page_size: int, head_dim: int, order: TokenOrder) -> None:
    from transfer.copy.head_slice import TritonCopier

    assert_agrees(shape(DType.BFLOAT16, DType.BFLOAT16, page_size, head_dim, order), TritonCopier, "cuda", has_kernels=True)


@pytest.mark.parametrize("order", list(TokenOrder))
@pytest.mark.parametrize("page_size", [1, 16, 48])
@pytest.mark.parametrize("pair", list(permutations(FLOATS, 2)), ids="-".join)
def test_conversions_are_digested_in_the_same_pass(pair: tuple[DType, DType], page_size: int, order: TokenOrder) -> None:
    from transfer.copy.head_slice import TritonCopier

    for head_dim in (64, 80, 128):
        case = shape(*pair, page_size, head_dim, order)
        assert case.plan(TritonCopier, case.pool("cuda", seed=1)).can_digest
        assert_agrees(case, TritonCopier, "cuda", has_kernels=True)


@pytest.mark.parametrize("scale", [1.0, 0.37, 12.0])
@pytest.mark.parametrize("source", FLOATS)
@pytest.mark.parametrize("target", FLOATS)
def test_conversions_are_exact_for_every_pattern(source: DType, target: DType, scale: float) -> None:
    """All bit patterns of the 8- and 16-bit types, random ones of float32 and numbers around the narrow types' limits."""
    bits = torch.randint(-(2**31), 2**31, (32768,), generator=torch.Generator().manual_seed(6)).to(torch.int32)
    near = torch.randn(32768, generator=torch.Generator().manual_seed(7)) * 2.0 ** torch.arange(-14, 18).repeat(1024)
    patterns = {
        1: torch.arange(65536).to(torch.uint8),
        2: torch.arange(-32768, 32768).to(torch.int16),
        4: torch.cat([bits, near.view(torch.int32)]),
    }[source.num_bytes]
    layout = KVLayout.uniform(num_layers=1, num_kv_heads=1, head_dim=1024, v_head_dim=0, dtype=source)
    pool = PagedKVPool(layout=layout, shard=Shard(page_size=64), num_pages=1, device="cuda")
    as_words(pool.buffer(0, is_v=False)).view(-1).copy_(patterns)
    buffer = WireBuffer(layer=0, is_v=False, tokens=Range(begin=0, end=64), row_bytes=1024 * target.num_bytes, offset_bytes=0)
    what = {"heads": Range(begin=0, end=1), "wire_dtype": target, "scales": {(0, False): scale}}
    wire, expected = (torch.zeros(65536 * target.num_bytes, dtype=torch.uint8, device="cuda") for _ in range(2))
    pages = torch.zeros(1, dtype=torch.int64, device="cuda")
    head_slice_copier(pool, **what).plan([buffer]).gather(pages, wire)
    TorchCopier(pool, **what).plan([buffer]).gather(pages, expected)
    found, right = wire.view(TORCH_DTYPES[target]), expected.view(TORCH_DTYPES[target])
    is_nan = right.float().isnan()
    assert torch.equal(found.float().isnan(), is_nan)
    assert torch.equal(as_words(found)[~is_nan], as_words(right)[~is_nan])


def shape(source: DType, target: DType, page_size: int, head_dim: int, order: TokenOrder) -> Case:
    num_pages = -(-700 // page_size)
    pages = torch.randperm(num_pages, generator=torch.Generator().manual_seed(8)).tolist()
    return Case(
        layout=KVLayout.uniform(num_layers=3, num_kv_heads=4, head_dim=head_dim, dtype=source),
        shard=Shard(page_size=page_size, order=order),
        num_pages=num_pages,
        heads=Range(begin=1, end=3),
        wire_dtype=target,
        pages=tuple(pages),
        tokens=Range(begin=5, end=691),
        num_tokens=691,
    )


def plain_plan(pool: PagedKVPool, num_tokens: int, *, heads: int) -> tuple[list[WireBuffer], Range]:
    layers, element = Range(begin=0, end=pool.layout.num_layers), pool.element
    route = Route(
        index=0,
        prefill_rank=0,
        decode_rank=0,
        layers=layers,
        heads=HeadSlice(source_start=0, target_start=0, count=heads),
    )
    tokens = Range(begin=0, end=num_tokens)
    buffers = wire_buffers(pool.layout, route, tokens=tokens, layers=layers, num_tokens=num_tokens, dtype=element)
    return list(buffers), Range(begin=0, end=heads)


def test_offsets_beyond_32_bits() -> None:
    """A buffer of 6 GiB (more than 2**32 elements), its last pages in use, and a wire offset that the rows cross 2**32 with."""
    layout = KVLayout.uniform(num_layers=1, num_kv_heads=8, head_dim=128, v_head_dim=0, dtype=DType.INT8)
    num_pages = (6 << 30) // (64 * 1024)
    pool = PagedKVPool(layout=layout, shard=Shard(page_size=64), num_pages=num_pages, device="cuda")
    pages = torch.arange(num_pages - 1, -1, -1, device="cuda")
    pool.buffer(0, is_v=False).view(-1, 1024)[:, 0] = torch.arange(num_pages * 64, device="cuda").to(torch.int8)
    buffers, heads = plain_plan(pool, num_pages * 64, heads=8)
    out = torch.zeros(6 << 30, dtype=torch.uint8, device="cuda")
    sent, arrived = (torch.zeros(1, dtype=torch.int64, device="cuda") for _ in range(2))
    plan = head_slice_copier(pool, heads=heads, wire_dtype=DType.INT8).plan(buffers)
    plan.gather(pages, out, digest=sent)
    found, source = out.view(num_pages, 64, 1024), as_words(pool.buffer(0, is_v=False)).view(num_pages, 64, 1024)
    assert torch.equal(found[:, :, 0], source.flip(0)[:, :, 0])
    plan.scatter(torch.arange(num_pages, device="cuda"), out, digest=arrived)
    assert torch.equal(source, found)
    add_digest(arrived, out, out.numel())
    assert int(sent) != 0 and int(arrived) == (2 * int(sent) + 2**63) % 2**64 - 2**63
    quarter = out.numel() // 8
    parts = sum(int(words_sum(out[begin : begin + quarter], begin // 8)) for begin in range(0, out.numel(), quarter))
    assert (int(sent) - parts) % 2**64 == 0


@pytest.mark.parametrize("kernels", [Kernels.TRITON, Kernels.TORCH])
def test_runs_behind_the_current_stream_and_waits_for_nothing(kernels: Kernels) -> None:
    """A gather queued behind a slow fill of the pool sees what was filled, and the call is over long before."""
    case = shape(DType.BFLOAT16, DType.BFLOAT16, 16, 128, TokenOrder.NHD)
    pool, out = case.pool("cuda", seed=9), case.wire("cuda")
    plan = head_slice_copier(pool, heads=case.heads, wire_dtype=case.wire_dtype, kernels=kernels).plan(case.buffers)
    table, total = case.table("cuda"), torch.zeros(1, dtype=torch.int64, device="cuda")

    def gather() -> None:
        plan.gather(table, out, digest=total if plan.can_digest else None)
        if not plan.can_digest:
            add_digest(total, out, plan.num_wire_bytes, kernels)

    gather()  # compiled and loaded now
    torch.cuda.synchronize()
    total.zero_()
    stream, event = torch.cuda.Stream(), torch.cuda.Event()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream), nothing_waits():
        occupy(200_000_000)
        for layer in range(3):
            pool.buffer(layer, is_v=False).fill_(3.0)
            pool.buffer(layer, is_v=True).fill_(3.0)
        gather()
        event.record()
    assert not event.query()
    event.synchronize()
    assert bool((out[: plan.num_wire_bytes].view(torch.bfloat16) == 3.0).all())
    assert int(total) % 2**64 == int(words_sum(out[: plan.num_wire_bytes])) % 2**64


def test_a_stream_that_is_slow_with_a_table_holds_no_other_up() -> None:
    """Each stream fills its own copy; what a forgotten request had is filled again without the host waiting."""
    device = torch.device("cuda", torch.cuda.current_device())
    tables, streams = RequestTables(device, 2000), (torch.cuda.Stream(), torch.cuda.Stream())
    pages = torch.randperm(2000, generator=torch.Generator().manual_seed(5)).tolist()
    found, places = [], []
    for number in range(3):
        table = tables.cover(f"request {number}", pages[number : number + 250], 0, 250)
        ends = [torch.cuda.Event(), torch.cuda.Event()]
        for stream, end in zip(streams, ends, strict=True):
            with torch.cuda.stream(stream):
                if number:
                    with nothing_waits():
                        if stream is streams[0]:
                            occupy(200_000_000)
                        memory = table.use()
                else:
                    memory = table.use()
                found.append(memory.clone())
                end.record()
            places.append(memory.data_ptr())
        ends[1].synchronize()
        assert not number or not ends[0].query()
        grown = tables.cover(f"request {number}", pages[number : number + 400], 0, 400)
        with torch.cuda.stream(streams[1]):
            found.append(grown.use().clone())
        torch.cuda.synchronize()
        assert [
            entry[: 400 if is_grown else 250].tolist() for entry, is_grown in zip(found, (False, False, True), strict=True)
        ] == [
            pages[number : number + 250],
            pages[number : number + 250],
            pages[number : number + 400],
        ]
        found.clear()
        tables.forget(f"request {number}")
    assert len(set(places)) == 2, "the same memory for every request"
