"""Moves of whole pages: what every `PageMovement` is compared with the reference on."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from hypothesis import strategies as st
from torch import Tensor

from tests.runtime.scattered_tiers import HYBRID
from transfer.copy.page_mover import PageCopy, PageMove, PageMovement, PageMover
from transfer.copy.torch_copy import TorchPageMovement
from transfer.layer_groups import GroupKind, layer_groups
from transfer.layout import DType, KVLayout, LayerKind, LayerSpec, Shard, TokenOrder
from transfer.pool.host_pool import HostPool
from transfer.pool.kv_pool import KVPool, LayerBuffers, PoolView, as_words

Side = Literal["save", "load", "copy"]
MakeMovement = Callable[[KVPool, HostPool, int], PageMovement]

LATENTS = KVLayout(layers=(LayerSpec(kind=LayerKind.MLA, num_kv_heads=1, k_head_dim=18, v_head_dim=0),) * 3, dtype=DType.BFLOAT16)
UNEVEN = KVLayout(
    layers=tuple(
        LayerSpec(kind=LayerKind.ATTENTION, num_kv_heads=heads, k_head_dim=k, v_head_dim=v)
        for heads, k, v in ((2, 8, 4), (2, 8, 4), (4, 3, 3), (2, 8, 8))
    ),
    dtype=DType.FLOAT16,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PageCase:
    """Pools and what is moved between them.

    Args:
        num_pages, num_host_pages: Of each group; of states there are no host pages.
        buffer_pages: Of the largest page that fit half of the mover's buffer.
        is_view: The device pool is an engine's own tensors, in memory with gaps and in descending order.
    """

    layout: KVLayout
    shard: Shard
    num_pages: int
    num_host_pages: int
    buffer_pages: int
    is_consecutive: bool
    is_view: bool
    seed: int

    def pools(self, device: str = "cpu") -> tuple[KVPool, HostPool]:
        """Both, filled with random bytes; the same ones every time."""
        groups = layer_groups(self.layout)
        counts = [self.num_pages] * len(groups)
        pool = KVPool(layout=self.layout, shard=self.shard, num_pages=counts, device=device)
        if self.is_view:
            pool = _with_gaps(pool)
        host = HostPool(pool, num_pages=[0 if one.kind is GroupKind.STATE else self.num_host_pages for one in groups])
        generator = torch.Generator().manual_seed(self.seed)
        for words in (*device_words(pool), *host_words(host)):
            bits = torch.randint(0, 256, (words.numel() * words.element_size(),), dtype=torch.uint8, generator=generator)
            words.copy_(bits.view(words.dtype).view(words.shape))
        return pool, host

    def moves(self, side: Side, pool: KVPool, host: HostPool) -> list[PageMove] | list[PageCopy]:
        """Some pages of every group, in two moves each."""
        order = random.Random(self.seed)
        moves: list[PageMove] = []
        copies: list[PageCopy] = []
        for group, count in enumerate(pool.num_pages):
            device_pages = self._pages(order, count)
            if side == "copy":
                half = count // 2
                copies.append(PageCopy(group=group, source_pages=device_pages[:half], target_pages=device_pages[half : 2 * half]))
                continue
            host_pages = self._pages(order, host.num_pages[group])
            most = order.randint(0, min(len(device_pages), len(host_pages)))
            cut = order.randint(0, most)
            for begin, end in ((0, cut), (cut, most)):
                moves.append(PageMove(group=group, device_pages=device_pages[begin:end], host_pages=host_pages[begin:end]))
        return copies if side == "copy" else moves

    def _pages(self, order: random.Random, count: int) -> list[int]:
        pages = list(range(count))
        if not self.is_consecutive:
            order.shuffle(pages)
        return pages


def _with_gaps(pool: KVPool) -> KVPool:
    """A view of tensors in one allocation, the last layer first, whose pages do not follow each other."""
    buffers = [
        [pool.buffer(layer, is_v=is_v) for is_v in (False, True)[: pool.layout.layers[layer].num_buffers]]
        for layer in range(pool.layout.num_layers)
    ]
    sizes = [one.shape[1:].numel() * one.element_size() + 16 for of_layer in buffers for one in of_layer]
    pages = pool.num_pages[0]
    memory = torch.zeros(pages, sum(-(-size // 16) * 16 for size in sizes), dtype=torch.uint8, device=pool.device)
    end = memory.shape[1]
    views: list[LayerBuffers] = []
    for of_layer in buffers:
        tensors: list[Tensor] = []
        for one in of_layer:
            size = one.shape[1:].numel() * one.element_size()
            end -= -(-(size + 16) // 16) * 16
            tensors.append(memory[:, end : end + size].view(one.dtype).view(pages, *one.shape[1:]))
        views.append(LayerBuffers(k=tensors[0], v=tensors[1] if len(tensors) == 2 else None))
    return PoolView(layout=pool.layout, shard=pool.shard, buffers=views)


def device_words(pool: KVPool) -> list[Tensor]:
    """Every buffer's elements as integers."""
    return [
        as_words(pool.buffer(layer, is_v=is_v))
        for layer in range(pool.layout.num_layers)
        for is_v in (False, True)[: pool.layout.layers[layer].num_buffers]
    ]


def host_words(host: HostPool) -> list[Tensor]:
    return [host.pages(group) for group in range(len(host.num_pages))]


def assert_moves(case: PageCase, side: Side, make: MakeMovement, device: str = "cpu") -> None:
    """The same bytes as the reference moves, and nothing else touched on either side."""
    pool, host = case.pools(device)
    expected_pool, expected_host = case.pools(device)
    moves = case.moves(side, pool, host)
    buffer_bytes = 2 * case.buffer_pages * max(host.page_bytes)
    found = _run(side, pool, host, make, moves, buffer_bytes)
    expected = _run(side, expected_pool, expected_host, _by_torch, moves, buffer_bytes)
    assert found == expected
    pairs = zip((*device_words(pool), *host_words(host)), (*device_words(expected_pool), *host_words(expected_host)), strict=True)
    assert all(torch.equal(ours, theirs) for ours, theirs in pairs)
    for one in (host, expected_host):
        one.close()


def _by_torch(pool: KVPool, host: HostPool, buffer_bytes: int) -> PageMovement:
    return TorchPageMovement(pool, host, buffer_bytes=buffer_bytes)


def _run(
    side: Side, pool: KVPool, host: HostPool, make: MakeMovement, moves: list[PageMove] | list[PageCopy], buffer_bytes: int
) -> int:
    mover = PageMover(pool, host, buffer_bytes=buffer_bytes, movement=make(pool, host, buffer_bytes))
    return int(getattr(mover, side)(moves))


@st.composite
def page_cases(draw: st.DrawFn, *, max_pages: int = 9) -> PageCase:
    layout = draw(
        st.sampled_from(
            [
                HYBRID,
                LATENTS,
                UNEVEN,
                *(KVLayout.uniform(num_layers=3, num_kv_heads=2, head_dim=8, dtype=dtype) for dtype in DType),
            ]
        )
    )
    is_one_group = len(layer_groups(layout)) == 1
    return PageCase(
        layout=layout,
        shard=Shard(page_size=draw(st.sampled_from([1, 2, 4, 16])), order=draw(st.sampled_from(list(TokenOrder)))),
        num_pages=draw(st.integers(1, max_pages)),
        num_host_pages=draw(st.integers(1, max_pages)),
        buffer_pages=draw(st.integers(1, 3)),
        is_consecutive=draw(st.booleans()),
        is_view=is_one_group and draw(st.booleans()),
        seed=draw(st.integers(0, 1000)),
    )
