"""Pages in host memory: where the bytes of a page lie, and what is refused."""

from __future__ import annotations

import gc

import pytest
import torch

from tests.runtime.pieces import piece_of
from tests.runtime.scattered_tiers import HYBRID
from transfer.chunk import ChunkPlan, split_into_chunks
from transfer.copy.piece_copier import PieceCopier
from transfer.layer_groups import GroupKind, layer_groups
from transfer.layout import DType, KVLayout, Shard, TokenOrder, routes
from transfer.pool.host_pool import HostPool, mixed_pool
from transfer.pool.kv_pool import KVPool, as_words

GROUPS = layer_groups(HYBRID)
FULL = next(index for index, group in enumerate(GROUPS) if group.kind is GroupKind.FULL)
STATE = next(index for index, group in enumerate(GROUPS) if group.kind is GroupKind.STATE)


def make_pools(shard: Shard, host_pages: int = 3) -> tuple[KVPool, HostPool]:
    pool = KVPool(layout=HYBRID, shard=shard, num_pages=[4] * len(GROUPS))
    return pool, HostPool(pool, num_pages=[0 if index == STATE else host_pages for index in range(len(GROUPS))])


@pytest.mark.parametrize("order", list(TokenOrder))
@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("tp_size", [1, 2])
def test_a_page_is_all_layers_k_then_v_in_one_run(tp_size: int, page_size: int, order: TokenOrder) -> None:
    pool, host = make_pools(Shard(tp_size=tp_size, page_size=page_size, order=order))
    for group, count in enumerate(host.num_pages):
        if not count:
            continue
        part = host.part(group)
        expected = bytearray()
        for layer in part.layers:
            for is_v in (False, True)[: HYBRID.layers[layer].num_buffers]:
                buffer = part.buffer(layer, is_v=is_v)
                assert buffer.shape[1:] == pool.buffer(layer, is_v=is_v).shape[1:]
                words = as_words(buffer)[1]
                words.copy_(torch.randint(0, 100, words.shape).to(words.dtype))
                expected += words.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        assert host.page(group, 1) == expected and len(expected) == host.page_bytes[group]
        assert not any(host.page(group, 0)) and not any(host.page(group, 2))
    assert host.num_bytes == sum(count * size for count, size in zip(host.num_pages, host.page_bytes, strict=True))


def test_what_is_written_to_a_page_is_read_in_its_part() -> None:
    pool = KVPool(
        layout=KVLayout.uniform(num_layers=1, num_kv_heads=1, head_dim=2, dtype=DType.INT8), shard=Shard(page_size=1), num_pages=1
    )
    host = HostPool(pool, num_pages=[2])
    page = host.page(0, 1)
    page[:] = bytes(range(1, 5))
    assert host.part(0).buffer(0, is_v=False)[1].flatten().tolist() == [1, 2]
    assert host.part(0).buffer(0, is_v=True)[1].flatten().tolist() == [3, 4]
    assert host.device_part(0) is host.part(0) and not host.is_pinned
    host.close()
    host.close()
    del host
    gc.collect()
    assert bytes(page) == bytes(range(1, 5)), "the memory stays for as long as somebody looks at it"


def test_a_mixed_pool_has_full_attention_in_host_pages_and_the_rest_on_the_device() -> None:
    pool, host = make_pools(Shard(page_size=2), host_pages=9)
    mixed = mixed_pool(pool, host, FULL)
    assert mixed.num_pages == tuple(9 if index == FULL else 4 for index in range(len(GROUPS)))
    for layer in range(HYBRID.num_layers):
        expected = host.part(FULL) if layer in GROUPS[FULL].layers else pool
        assert mixed.buffer(layer, is_v=False).data_ptr() == expected.buffer(layer, is_v=False).data_ptr()


@pytest.mark.parametrize("order", list(TokenOrder))
def test_a_prompt_is_scattered_straight_into_host_pages(order: TokenOrder) -> None:
    """By the copiers that there are, over a mixed pool, into pages in no order."""
    layout = KVLayout.uniform(num_layers=2, num_kv_heads=2, head_dim=4, dtype=DType.FLOAT32)
    shard = Shard(page_size=4, order=order)
    pool = KVPool(layout=layout, shard=shard, num_pages=1)
    host = HostPool(pool, num_pages=[9])
    (route,) = routes(layout, shard, shard)
    (chunk,) = split_into_chunks(ChunkPlan(chunk_tokens=32, layers_per_group=2), num_tokens=22, num_layers=2)
    table = [7, 0, 3, 8, 1, 5]
    piece = piece_of(layout, route, chunk, num_tokens=22, dtype=DType.FLOAT32)
    wire = torch.randn(piece.num_bytes // 4)
    PieceCopier(mixed_pool(pool, host, 0), is_source=False).prepare(piece, [table]).scatter(wire.view(torch.uint8))
    values = wire.view(4, 22, 2, 4)  # K and V of both layers
    slots = (torch.tensor(table)[:, None] * 4 + torch.arange(4)).flatten()[:22]
    for layer in range(2):
        for found, expected in zip(host.part(0).read(layer, slots), values[2 * layer : 2 * layer + 2], strict=True):
            assert torch.equal(found, expected)
    assert host.part(0).buffer(0, is_v=False)[[2, 4, 6]].eq(0).all()
