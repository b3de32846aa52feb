"""The compiled kernels on a real GPU, against the reference on the same device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings

from node_runtime.piece_copier import PieceCopier
from node_runtime.request_tables import RequestTables
from tests.gpu.busy import occupy
from tests.kernels.kernel_cases import START, Case, assert_agrees, cases
from transfer.chunk import ChunkPlan, split_into_chunks
from transfer.errors import LayoutError
from transfer.kernels import add_digest, head_slice_copier
from transfer.kernels.digest import DIGEST_WORDS, HostDigest, digest
from transfer.kernels.reference import ReferenceCopier, reference_words_sum
from transfer.kv_pool import TORCH_DTYPES, KVPool, PagedKVPool, as_words
from transfer.layout import DType, HeadSlice, KVLayout, Route, Shard, Span, TokenOrder, WireBuffer, routes, wire_buffers

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA: this torch sees no device"),
]

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
    from transfer.kernels.head_slice import TritonCopier

    assert_agrees(case, TritonCopier, "cuda", has_kernels=True)


@pytest.mark.parametrize("order", list(TokenOrder))
@pytest.mark.parametrize("head_dim", [64, 80, 128, 192, 576])
@pytest.mark.parametrize("page_size", [1, 16, 48, 256])
def test_shapes_that_engines_use(page_size: int, head_dim: int, order: TokenOrder) -> None:
    from transfer.kernels.head_slice import TritonCopier

    assert_agrees(shape(DType.BFLOAT16, DType.BFLOAT16, page_size, head_dim, order), TritonCopier, "cuda", has_kernels=True)


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
    buffer = WireBuffer(layer=0, is_v=False, tokens=Span(begin=0, end=64), row_bytes=1024 * target.num_bytes, offset_bytes=0)
    what = {"heads": Span(begin=0, end=1), "wire_dtype": target, "scales": {(0, False): scale}}
    wire, expected = (torch.zeros(65536 * target.num_bytes, dtype=torch.uint8, device="cuda") for _ in range(2))
    pages = torch.zeros(1, dtype=torch.int64, device="cuda")
    head_slice_copier(pool, **what).plan([buffer]).gather(pages, wire)
    ReferenceCopier(pool, **what).plan([buffer]).gather(pages, expected)
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
        heads=Span(begin=1, end=3),
        wire_dtype=target,
        pages=tuple(pages),
        tokens=Span(begin=5, end=691),
        num_tokens=691,
    )


def plain_plan(pool: PagedKVPool, num_tokens: int, *, heads: int) -> tuple[list[WireBuffer], Span]:
    layers, element = Span(begin=0, end=pool.layout.num_layers), pool.element
    route = Route(
        index=0,
        prefill_rank=0,
        decode_rank=0,
        layers=layers,
        heads=HeadSlice(source_start=0, target_start=0, count=heads),
    )
    tokens = Span(begin=0, end=num_tokens)
    buffers = wire_buffers(pool.layout, route, tokens=tokens, layers=layers, num_tokens=num_tokens, dtype=element)
    return list(buffers), Span(begin=0, end=heads)


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
    parts = sum(reference_words_sum(out[begin : begin + quarter], begin // 8) for begin in range(0, out.numel(), quarter))
    assert (int(sent) - parts) % 2**64 == 0


@dataclass(frozen=True)
class AddressOnly:
    """A wire that is known as a peer's ring is: by address, and by the device whose kernels may use it."""

    memory: torch.Tensor
    device_index: int

    def data_ptr(self) -> int:
        return self.memory.data_ptr()

    def numel(self) -> int:
        return self.memory.numel()


def test_a_wire_that_is_only_an_address() -> None:
    case = shape(DType.BFLOAT16, DType.BFLOAT16, 16, 128, TokenOrder.NHD)
    pool, wire, expected = case.pool("cuda", seed=9), case.wire("cuda"), case.wire("cuda")
    from transfer.kernels.head_slice import TritonCopier

    plan, table, index = case.plan(TritonCopier, pool), case.table("cuda"), wire.device.index
    plan.gather(table, expected)
    total = torch.full((1,), START, dtype=torch.int64, device="cuda")
    plan.gather(table, AddressOnly(wire, index), digest=total)
    assert torch.equal(wire, expected)
    assert (int(total) - START) % 2**64 == reference_words_sum(wire[: plan.num_wire_bytes])
    with pytest.raises(LayoutError, match="for kernels of device 63"):
        plan.gather(table, AddressOnly(wire, 63))
    with pytest.raises(LayoutError, match=r"out is torch.uint8 .* on cpu; must be contiguous uint8"):
        plan.gather(table, wire.cpu())
    with pytest.raises(LayoutError, match="digest is a HostDigest"):
        plan.gather(table, wire, digest=HostDigest(DIGEST_WORDS))
    with pytest.raises(LayoutError, match=r"pages is torch.int64 .* on cpu"):
        plan.gather(table.cpu(), wire)


def test_pages_outside_the_pool_are_left_out() -> None:
    """A table on a GPU is not checked: the kernel must not follow it out of the pool."""
    case = shape(DType.BFLOAT16, DType.BFLOAT16, 16, 128, TokenOrder.NHD)
    from transfer.kernels.head_slice import TritonCopier

    pool, wire, expected = case.pool("cuda", seed=9), case.wire("cuda"), case.wire("cuda")
    plan, table = case.plan(TritonCopier, pool), case.table("cuda")
    table[3], table[7] = case.num_pages, -1
    plan.gather(table, wire)
    torch.cuda.synchronize()
    case.plan(ReferenceCopier, pool).gather(case.table("cuda"), expected)
    row, begin = 2 * 128 * 2, 5  # bytes of a token, and the first token
    for buffer in plan.buffers:
        found, right = (
            one[buffer.offset_bytes : buffer.offset_bytes + buffer.num_bytes].view(-1, row) for one in (wire, expected)
        )
        for page in range(12):
            tokens = slice(max(0, page * 16 - begin), (page + 1) * 16 - begin)
            assert bool((found[tokens] == 0xA5).all()) if page in (3, 7) else torch.equal(found[tokens], right[tokens])


def test_runs_behind_the_current_stream_and_waits_for_nothing() -> None:
    """A gather queued behind a slow fill of the pool sees what was filled, and the call is over long before."""
    case = shape(DType.BFLOAT16, DType.BFLOAT16, 16, 128, TokenOrder.NHD)
    pool, out = case.pool("cuda", seed=9), case.wire("cuda")
    plan = head_slice_copier(pool, heads=case.heads, wire_dtype=case.wire_dtype).plan(case.buffers)
    table, total = case.table("cuda"), torch.zeros(1, dtype=torch.int64, device="cuda")
    plan.gather(table, out, digest=total)  # compiled now
    torch.cuda.synchronize()
    total.zero_()
    stream, event = torch.cuda.Stream(), torch.cuda.Event()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream), nothing_waits():
        occupy(200_000_000)
        for layer in range(3):
            pool.buffer(layer, is_v=False).fill_(3.0)
            pool.buffer(layer, is_v=True).fill_(3.0)
        plan.gather(table, out, digest=total)
        event.record()
    assert not event.query()
    event.synchronize()
    assert bool((out[: plan.num_wire_bytes].view(torch.bfloat16) == 3.0).all())
    assert int(total) % 2**64 == reference_words_sum(out[: plan.num_wire_bytes])


def test_pieces_of_two_requests_with_tables_that_grow() -> None:
    """Chunk by chunk, with page tables that get longer, over two streams; nothing waits once a piece's shape is known."""
    layout = KVLayout.uniform(num_layers=4, num_kv_heads=4, head_dim=64, dtype=DType.BFLOAT16)
    shard, tokens, page_size = Shard(page_size=4), 3000, 4
    pool = KVPool(layout=layout, shard=shard, num_pages=2000, device="cuda")
    for layer in range(4):
        for is_v in (False, True):
            pool.buffer(layer, is_v=is_v).normal_()
    host = KVPool(layout=layout, shard=shard, num_pages=2000)
    for layer in range(4):
        for is_v in (False, True):
            host.buffer(layer, is_v=is_v).copy_(pool.buffer(layer, is_v=is_v))
    order = torch.randperm(2000, generator=torch.Generator().manual_seed(2)).tolist()
    tables = {"a": order[:750], "b": order[750:1500]}
    (route,) = routes(layout, shard, shard)
    chunks = split_into_chunks(ChunkPlan(chunk_tokens=512), num_tokens=tokens, num_layers=4)
    copier, on_host = PieceCopier(pool), PieceCopier(host)
    what = {"heads": Span(begin=0, end=4), "num_tokens": tokens, "dtype": DType.BFLOAT16}
    streams = {"a": torch.cuda.Stream(), "b": torch.cuda.Stream()}
    found: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []
    torch.cuda.synchronize()
    for number, chunk in enumerate(chunks):
        for request_id, table in tables.items():
            known = (table[: -(-chunk.tokens.end // page_size)],)
            piece = copier.prepare(layout, route, chunk, request_id=request_id, tables=known, **what)
            wire = torch.zeros(piece.num_wire_bytes, dtype=torch.uint8)
            on_host.prepare(layout, route, chunk, request_id=request_id, tables=known, **what).gather(wire)
            out = torch.zeros(piece.num_wire_bytes, dtype=torch.uint8, device="cuda")
            total = torch.zeros(1, dtype=torch.int64, device="cuda")
            streams[request_id].wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(streams[request_id]):
                if 0 < number < len(chunks) - 1:
                    with nothing_waits():
                        piece.gather(out, total)
                else:
                    piece.gather(out, total)
            found.append((wire, out, total))
    torch.cuda.synchronize()
    for wire, out, total in found:
        assert torch.equal(out.cpu(), wire)
        assert int(total) % 2**64 == digest(wire, DIGEST_WORDS)
    for request_id in (*tables, *tables):
        copier.forget(request_id)


def test_a_stream_that_is_slow_with_a_table_holds_no_other_up() -> None:
    """Each stream fills its own copy; what a forgotten request had is filled anew without the host waiting."""
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


@pytest.mark.timeout(300)
@pytest.mark.parametrize("is_gather", [True, False])
def test_pieces_of_a_route_that_was_warmed_compile_nothing(is_gather: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    from transfer.kernels import copy_kernel

    device = torch.device("cuda", torch.cuda.current_device())
    layout = KVLayout.uniform(num_layers=3, num_kv_heads=3, head_dim=96, dtype=DType.BFLOAT16)
    shard, plan = Shard(page_size=16), ChunkPlan(chunk_tokens=64)
    copier = PieceCopier(KVPool(layout=layout, shard=shard, num_pages=32, device="cuda"))
    (route,) = routes(layout, shard, shard)
    what = {"heads": Span(begin=0, end=3), "dtype": DType.BFLOAT16}
    copier.warm(layout, route, plan, is_gather=is_gather, **what)

    def refuse(*arguments: object, **options: object) -> None:
        raise AssertionError("a kernel is compiled")

    monkeypatch.setattr(copy_kernel.copy_pieces, "warmup", refuse)
    total = torch.zeros(1, dtype=torch.int64, device=device)
    for num_tokens in (1, 63, 64, 65, 200):
        for chunk in split_into_chunks(plan, num_tokens=num_tokens, num_layers=3):
            tables = [range(32)]
            piece = copier.prepare(layout, route, chunk, request_id="a", num_tokens=num_tokens, tables=tables, **what)
            wire = torch.zeros(piece.num_wire_bytes, dtype=torch.uint8, device=device)
            piece.make_ready(wire, is_gather=is_gather)
            with nothing_waits():
                (piece.gather if is_gather else piece.scatter)(wire, total)
    torch.cuda.synchronize()
