"""Whole pages between a GPU's pool and pinned host memory, by the compiled kernel and the copy engines."""

from __future__ import annotations

import threading

import pytest
import torch
from hypothesis import given, settings

from node_runtime.piece_copier import PieceCopier
from tests.gpu.busy import occupy
from tests.kernels.page_cases import PageCase, Side, assert_moves, page_cases
from transfer import host_pool
from transfer.chunk import ChunkPlan, split_into_chunks
from transfer.errors import MemoryPlanError
from transfer.host_pool import HostPool, mixed_pool
from transfer.kernels.page_mover import PageMove, PageMover, movement_of
from transfer.kv_pool import KVPool
from transfer.layout import DType, KVLayout, Shard, Span, TokenOrder, routes

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA: this torch sees no device"),
]

LAYOUT = KVLayout.uniform(num_layers=4, num_kv_heads=8, head_dim=128, dtype=DType.BFLOAT16)
BUFFER_BYTES = 8 << 20


def make_pools(num_pages: int = 64, num_host_pages: int = 96, page_size: int = 16) -> tuple[KVPool, HostPool]:
    pool = KVPool(layout=LAYOUT, shard=Shard(page_size=page_size), num_pages=num_pages, device="cuda")
    for layer in range(LAYOUT.num_layers):
        for is_v in (False, True):
            pool.buffer(layer, is_v=is_v).normal_()
    return pool, HostPool(pool, num_pages=[num_host_pages])


def assert_saved(pool: KVPool, host: HostPool, device_pages: list[int], host_pages: list[int]) -> None:
    for layer in range(LAYOUT.num_layers):
        for is_v in (False, True):
            saved = host.part(0).buffer(layer, is_v=is_v)[host_pages]
            assert torch.equal(saved, pool.buffer(layer, is_v=is_v)[device_pages].cpu())


@pytest.mark.timeout(900)
@pytest.mark.parametrize("min_run_bytes", [0, 1 << 30])
@pytest.mark.parametrize("side", ["save", "load", "copy"])
@settings(max_examples=12, deadline=None)
@given(case=page_cases())
def test_moves_what_the_reference_moves(side: Side, min_run_bytes: int, case: PageCase) -> None:
    from transfer.kernels import device_page_mover

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(device_page_mover, "MIN_RUN_BYTES", min_run_bytes)
        assert_moves(case, side, movement_of, "cuda")


@pytest.mark.parametrize("order", list(TokenOrder))
@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_what_has_been_compiled_is_all_that_is_launched(
    order: TokenOrder, page_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transfer.kernels.page_kernel import copy_segments

    pool = KVPool(layout=LAYOUT, shard=Shard(page_size=page_size, order=order), num_pages=40, device="cuda")
    host = HostPool(pool, num_pages=[40])
    mover = PageMover(pool, host, buffer_bytes=8 * host.page_bytes[0])
    mover.compile()

    def refuse(*arguments: object, **options: object) -> None:
        raise AssertionError("a kernel is compiled")

    monkeypatch.setattr(copy_segments, "warmup", refuse)
    for host_pages in (list(range(40)), list(range(0, 40, 2))):
        moves = [PageMove(group=0, device_pages=list(range(len(host_pages))), host_pages=host_pages)]
        assert mover.save(moves) == mover.load(moves) == len(host_pages) * host.page_bytes[0]


@pytest.mark.parametrize("order", list(TokenOrder))
@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_many_pages_come_back_through_small_buffers(page_size: int, order: TokenOrder) -> None:
    pool = KVPool(layout=LAYOUT, shard=Shard(page_size=page_size, order=order), num_pages=300, device="cuda")
    pool.buffer(2, is_v=True).normal_()
    expected = pool.buffer(2, is_v=True).clone()
    host = HostPool(pool, num_pages=[300])
    mover = PageMover(pool, host, buffer_bytes=8 * host.page_bytes[0])
    device_pages = torch.randperm(300, generator=torch.Generator().manual_seed(1)).tolist()
    host_pages = list(range(300))
    assert mover.save([PageMove(group=0, device_pages=device_pages, host_pages=host_pages)]) == 300 * host.page_bytes[0]
    pool.buffer(2, is_v=True).zero_()
    mover.load([PageMove(group=0, device_pages=device_pages, host_pages=host_pages)])
    assert torch.equal(pool.buffer(2, is_v=True), expected)


def test_a_save_waits_for_its_event_and_for_nothing_else() -> None:
    """What the event stands for takes long; another stream's work takes longer still, and is not waited for."""
    pool, host = make_pools()
    mover = PageMover(pool, host, buffer_bytes=BUFFER_BYTES)
    pages = list(range(32))
    mover.save([PageMove(group=0, device_pages=pages, host_pages=pages)])  # compiles
    other = torch.cuda.Stream()
    with torch.cuda.stream(other):
        occupy(4_000_000_000)  # some two seconds
        over = torch.cuda.Event()
        over.record()
    occupy(200_000_000)
    pool.buffer(1, is_v=False).fill_(5.0)
    written = torch.cuda.Event()
    written.record()
    mover.save([PageMove(group=0, device_pages=pages, host_pages=pages)], after=written)
    assert not over.query()
    assert host.part(0).buffer(1, is_v=False)[:32].eq(5.0).all()
    torch.cuda.synchronize()


def test_saves_and_loads_run_beside_each_other_and_beside_a_step() -> None:
    """Two movers on threads of their own, while the default stream computes and writes other pages."""
    pool, host = make_pools(num_pages=96, num_host_pages=64)
    movers = [PageMover(pool, host, buffer_bytes=BUFFER_BYTES) for _ in range(2)]
    first, second, third = list(range(32)), list(range(32, 64)), list(range(64, 96))
    movers[0].save([PageMove(group=0, device_pages=second, host_pages=second)])
    failures: list[BaseException] = []

    def run(call: object, device_pages: list[int], host_pages: list[int]) -> None:
        try:
            for _ in range(20):
                call([PageMove(group=0, device_pages=device_pages, host_pages=host_pages)])  # type: ignore[operator]
        except BaseException as error:
            failures.append(error)

    threads = [
        threading.Thread(target=run, args=(movers[0].save, first, first)),
        threading.Thread(target=run, args=(movers[1].load, second, second)),
    ]
    for thread in threads:
        thread.start()
    matrix = torch.randn(2048, 2048, device="cuda")
    for number in range(50):
        matrix = torch.tanh(matrix @ matrix)
        for layer in range(LAYOUT.num_layers):
            pool.buffer(layer, is_v=True)[third] = float(number)
    for thread in threads:
        thread.join(60)
    torch.cuda.synchronize()
    assert not failures
    assert_saved(pool, host, [*first, *second], [*first, *second])
    assert pool.buffer(3, is_v=True)[third].eq(49.0).all()


def test_pinned_memory_is_the_devices_too_until_it_is_closed() -> None:
    pool, host = make_pools()
    assert host.is_pinned
    on_device = host.device_part(0).buffer(2, is_v=False)
    assert on_device.device == pool.device and on_device.data_ptr() == host.part(0).buffer(2, is_v=False).data_ptr()
    on_device[7] = 3.0
    torch.cuda.synchronize()
    assert host.part(0).buffer(2, is_v=False)[7].eq(3.0).all() and host.part(0).buffer(2, is_v=False)[6].eq(0.0).all()
    host.close()
    host.close()
    assert not host.is_pinned and host.part(0).buffer(2, is_v=False)[7].eq(3.0).all()


def repeat_memory(patch: pytest.MonkeyPatch) -> None:
    """Let every host pool that is made from now on have the memory of the first."""
    made, zeroed_bytes = [], host_pool.zeroed_bytes

    def repeated(num_bytes: int) -> torch.Tensor:
        if not made:
            made.append(zeroed_bytes(num_bytes))
        return made[0]

    patch.setattr(host_pool, "zeroed_bytes", repeated)


def test_a_pool_that_nobody_closes_is_unpinned_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its memory can be pinned again: a second pool lies at the same addresses."""
    repeat_memory(monkeypatch)
    pool, host = make_pools()
    del host
    assert HostPool(pool, num_pages=[96]).is_pinned
    torch.ones(1, device="cuda")  # no error is left for others


def test_memory_that_cannot_be_pinned_is_told_with_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Twice the same memory, which CUDA refuses."""
    repeat_memory(monkeypatch)
    pool, host = make_pools()
    with pytest.raises(MemoryPlanError, match=rf"could not pin the host pool's {host.num_bytes} bytes"):
        HostPool(pool, num_pages=[96])
    torch.ones(1, device="cuda")  # no error is left for others


@pytest.mark.parametrize("order", list(TokenOrder))
def test_a_prompt_is_scattered_straight_into_host_pages(order: TokenOrder) -> None:
    """By the existing copiers, over a mixed pool: what a gather from the host pages gives again."""
    shard = Shard(page_size=16, order=order)
    pool = KVPool(layout=LAYOUT, shard=shard, num_pages=2, device="cuda")
    host = HostPool(pool, num_pages=[40])
    copier = PieceCopier(mixed_pool(pool, host, 0))
    (route,) = routes(LAYOUT, shard, shard)
    num_tokens = 500
    (chunk,) = split_into_chunks(
        ChunkPlan(chunk_tokens=512, layers_per_group=LAYOUT.num_layers), num_tokens=num_tokens, num_layers=LAYOUT.num_layers
    )
    table = torch.randperm(40, generator=torch.Generator().manual_seed(2))[:32].tolist()
    piece = copier.prepare(
        LAYOUT,
        route,
        chunk,
        request_id="a",
        heads=Span(begin=0, end=8),
        num_tokens=num_tokens,
        dtype=DType.BFLOAT16,
        tables=[table],
    )
    wire = torch.randint(0, 256, (piece.num_wire_bytes,), dtype=torch.uint8, device="cuda")
    total, expected = (torch.zeros(1, dtype=torch.int64, device="cuda") for _ in range(2))
    piece.scatter(wire, total)
    back = torch.zeros_like(wire)
    piece.gather(back, expected)
    torch.cuda.synchronize()
    assert torch.equal(back, wire) and int(total) == int(expected)
    words = wire.view(torch.int16)[: num_tokens * 8 * 128].view(num_tokens, 8, 128)  # K of layer 0
    pages = host.part(0).buffer(0, is_v=False).view(torch.int16)
    tokens = pages if order is TokenOrder.NHD else pages.transpose(1, 2)
    found = tokens[table].reshape(-1, 8, 128)[:num_tokens]
    assert torch.equal(found, words.cpu())
