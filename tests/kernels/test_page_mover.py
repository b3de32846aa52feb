"""Whole pages between a device pool and a host pool, here both in host memory; and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings

from tests.kernels.page_cases import PageCase, Side, assert_moves, page_cases
from transfer.copy.host_page_mover import HostPageMovement
from transfer.copy.page_mover import PageCopy, PageMove, PageMover
from transfer.errors import ConfigError, LayoutError
from transfer.layout import DType, KVLayout, Shard, TokenOrder
from transfer.pool.host_pool import HostPool
from transfer.pool.kv_pool import KVPool, LayerBuffers, PoolView

LAYOUT = KVLayout.uniform(num_layers=2, num_kv_heads=2, head_dim=4, dtype=DType.FLOAT32)


def make_pools(num_pages: int = 6, num_host_pages: int = 5) -> tuple[KVPool, HostPool]:
    pool = KVPool(layout=LAYOUT, shard=Shard(page_size=2), num_pages=num_pages)
    return pool, HostPool(pool, num_pages=[num_host_pages])


def make_mover(**sizes: int) -> PageMover:
    pool, host = make_pools(**sizes)
    return PageMover(pool, host, buffer_bytes=1 << 16)


@pytest.mark.parametrize("side", ["save", "load", "copy"])
@settings(max_examples=50)
@given(case=page_cases())
def test_moves_what_the_reference_moves(side: Side, case: PageCase) -> None:
    assert_moves(case, side, lambda pool, host, _: HostPageMovement(pool, host))


def test_pages_come_back_as_they_were_from_another_place() -> None:
    pool, host = make_pools()
    mover = PageMover(pool, host, buffer_bytes=1 << 16)
    mover.compile()
    pool.buffer(1, is_v=True)[3] = 7.0
    assert mover.save([PageMove(group=0, device_pages=[3, 1], host_pages=[0, 4])]) == 2 * host.page_bytes[0]
    pool.buffer(1, is_v=True).zero_()
    assert mover.load([PageMove(group=0, device_pages=[5], host_pages=[0])]) == host.page_bytes[0]
    assert pool.buffer(1, is_v=True)[5].eq(7.0).all() and pool.buffer(1, is_v=True)[:5].eq(0).all()
    assert mover.save([]) == mover.load([PageMove(group=0, device_pages=[], host_pages=[])]) == 0


def test_a_copy_waits_for_the_event_before_it() -> None:
    """The pages are read only once the event has happened."""
    pool, host = make_pools()

    class Step:
        def synchronize(self) -> None:
            pool.buffer(0, is_v=False)[0] = 3.0

    PageMover(pool, host, buffer_bytes=1 << 16).save([PageMove(group=0, device_pages=[0], host_pages=[0])], after=Step())
    assert host.part(0).buffer(0, is_v=False)[0].eq(3.0).all()


@pytest.mark.parametrize(
    ("side", "move", "message"),
    [
        ("save", {"device_pages": [6], "host_pages": [0]}, r"device_pages has pages 6 to 6; the pool's are in \[0, 6\)"),
        ("save", {"device_pages": [0, 1], "host_pages": [2, 2]}, "host_pages has page 2 of group 0 twice"),
        ("copy", {"source_pages": [0, 1], "target_pages": [1, 2]}, "page 1 of group 0 is both source and target"),
    ],
)
def test_a_move_that_does_not_fit_is_refused(side: Side, move: dict[str, Any], message: str) -> None:
    mover = make_mover()
    kind = PageCopy if side == "copy" else PageMove
    with pytest.raises(LayoutError, match=message):
        getattr(mover, side)([kind(group=0, **move)])


def test_a_buffer_that_holds_no_two_pages_is_refused() -> None:
    pool, host = make_pools()
    size = host.page_bytes[0]
    with pytest.raises(ConfigError, match=f"buffer_bytes is {2 * size - 1}; must be at least {2 * size}"):
        PageMover(pool, host, buffer_bytes=2 * size - 1)


@pytest.mark.parametrize("order", list(TokenOrder))
def test_pages_that_are_not_contiguous_are_refused(order: TokenOrder) -> None:
    pool = KVPool(layout=LAYOUT, shard=Shard(page_size=2, order=order), num_pages=3)
    buffers = [
        LayerBuffers(
            k=pool.buffer(layer, is_v=False), v=pool.buffer(layer, is_v=True).transpose(1, 2).contiguous().transpose(1, 2)
        )
        for layer in range(2)
    ]
    view = PoolView(layout=LAYOUT, shard=pool.shard, buffers=buffers)
    with pytest.raises(LayoutError, match=r"v of layer 0 .*must each be contiguous"):
        PageMover(view, HostPool(view, num_pages=[2]), buffer_bytes=1 << 16)
