"""Whole pages between a GPU's pool and pinned host memory, by the compiled kernel and the copy engines."""

from __future__ import annotations

import threading
from functools import partial

import pytest
import torch
from hypothesis import given, settings

from tests.gpu.busy import occupy
from tests.kernels.page_cases import PageCase, Side, assert_moves, page_cases
from transfer.copy.page_mover import PageMove, PageMover, movement_of
from transfer.copy.page_segments import IoBackend
from transfer.errors import MemoryPlanError
from transfer.layout import DType, KVLayout, Shard
from transfer.pool import host_pool
from transfer.pool.host_pool import HostPool
from transfer.pool.kv_pool import KVPool

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
@pytest.mark.parametrize("io_backend", ["auto", "copies", "kernel"])
@pytest.mark.parametrize("side", ["save", "load", "copy"])
@settings(max_examples=12, deadline=None)
@given(case=page_cases())
def test_moves_what_the_reference_moves(side: Side, io_backend: IoBackend, case: PageCase) -> None:
    assert_moves(case, side, partial(movement_of, io_backend=io_backend), "cuda")


def test_a_save_waits_for_its_event_and_for_nothing_else() -> None:
    """What the event stands for takes long; another stream's work takes longer still, and is not waited for."""
    pool, host = make_pools()
    mover = PageMover(pool, host, buffer_bytes=BUFFER_BYTES)
    pages = list(range(32))
    mover.save([PageMove(group=0, device_pages=pages, host_pages=pages)])  # compiles
    pool.buffer(1, is_v=False).fill_(0.0)  # the first launch of a kernel loads it, and waits for the whole device
    torch.cuda.synchronize()
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


def test_memory_that_cannot_be_pinned_is_told_with_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Twice the same memory, which CUDA refuses."""
    repeat_memory(monkeypatch)
    pool, host = make_pools()
    with pytest.raises(MemoryPlanError, match=rf"could not pin the host pool's {host.num_bytes} bytes"):
        HostPool(pool, num_pages=[96])
    torch.ones(1, device="cuda")  # no error is left for others
