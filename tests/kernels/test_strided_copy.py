"""Pools whose heads' elements are not adjacent: bit for bit as the reference, in the same bytes as from any other pool."""

from __future__ import annotations

import tracemalloc
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kernels.kernel_cases import Case, Placement, assert_agrees, assert_same_pools, cases, placements, tensors
from transfer.kernels import HeadSliceCopier, head_slice_copier, strided_copy
from transfer.kernels.host_copy import HostCopier
from transfer.kernels.strided_copy import StridedCopier
from transfer.kv_pool import LayerBuffers, PagedKVPool, as_words
from transfer.layout import DType, KVLayout, LayerSpec, Shard, Span, TokenOrder

PACKED = Placement(is_packed=True)


@pytest.mark.parametrize("limits", [{}, {"ALIASING_BYTES": 1, "TILE_TOKENS": 3}], ids=["", "a scatter takes tiles"])
@settings(max_examples=80)
@given(case=st.one_of(cases(), cases(max_page_size=256, max_pages=30, max_dim=3)), placement=st.one_of(st.none(), placements()))
def test_agrees_with_the_reference(limits: dict[str, int], case: Case, placement: Placement | None) -> None:
    """Also on pools of our own: where `placement` is None."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in limits.items():
            patch.setattr(strided_copy, name, value)
        assert_agrees(replace(case, placement=placement), StridedCopier)


def packed_case(order: TokenOrder, **changes: object) -> Case:
    spec = LayerSpec(num_kv_heads=3, k_head_dim=8, v_head_dim=8)
    case = Case(
        layout=KVLayout(layers=(spec, spec), dtype=DType.FLOAT32),
        shard=Shard(page_size=4, order=order),
        num_pages=6,
        heads=Span(begin=1, end=3),
        wire_dtype=DType.FLOAT32,
        pages=(4, 5, 0, 2, 1),
        tokens=Span(begin=2, end=19),
        num_tokens=19,
        placement=PACKED,
    )
    return replace(case, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize("order", TokenOrder)
@pytest.mark.parametrize("tokens", [Span(begin=2, end=19), Span(begin=0, end=20), Span(begin=5, end=6), Span(begin=3, end=9)])
def test_each_element_of_a_packed_block_is_where_its_definition_says(order: TokenOrder, tokens: Span) -> None:
    case = packed_case(order, tokens=tokens)
    pool = case.pool("cpu", seed=1)
    # Of K, element d of token t is the block's number d * page_size + t; V begins behind all of K, with its tokens as rows.
    blocks = torch.arange(6 * 3 * 64, dtype=torch.float32).view(6, 3, 64)
    for layer in (0, 1):
        storage = pool.buffer(layer, is_v=False).untyped_storage()
        torch.empty(0).set_(storage).view(6, 3, 64).copy_(blocks + layer * 10_000)
    wire = case.wire("cpu")
    case.plan(StridedCopier, pool).gather(case.table("cpu"), wire)
    found = wire[:-24].view(torch.float32).view(2, 2, len(tokens), 2, 8)
    for row, token in enumerate(range(tokens.begin, tokens.end)):
        page, offset = case.pages[token // 4], token % 4
        for head in (1, 2):
            for layer in (0, 1):
                block = blocks[page, head] + layer * 10_000
                assert found[layer, 0, row, head - 1].tolist() == block[:32].view(8, 4)[:, offset].tolist()
                assert found[layer, 1, row, head - 1].tolist() == block[32:].view(4, 8)[offset].tolist()


def test_nan_bits_survive_a_copy() -> None:
    case = packed_case(TokenOrder.HND, tokens=Span(begin=0, end=20))
    pool, target = case.pool("cpu", seed=1), case.pool("cpu", seed=1)
    for index, tensor in enumerate(tensors(pool)):
        generator = torch.Generator().manual_seed(index)
        as_words(tensor).copy_(torch.randint(0x7F800001, 0x7FFFFFFF, tensor.shape, generator=generator))
    wire, again = case.wire("cpu"), case.wire("cpu")
    case.plan(StridedCopier, pool).gather(case.table("cpu"), wire)
    case.plan(StridedCopier, target).scatter(case.table("cpu"), wire)
    case.plan(StridedCopier, target).gather(case.table("cpu"), again)
    assert torch.equal(wire, again) and bool(wire[:-24].view(torch.float32).isnan().all())


def test_a_copy_makes_no_temporary() -> None:
    pages, shard = tuple(range(0, 64, 2)), Shard(page_size=256, order=TokenOrder.HND)
    case = packed_case(TokenOrder.HND, shard=shard, num_pages=64, pages=pages, tokens=Span(begin=9, end=8000))
    pool, wire, table = case.pool("cpu", seed=1), case.wire("cpu"), case.table("cpu")
    plan = case.plan(StridedCopier, pool)
    plan.gather(table, wire)  # what is imported or cached by a first call
    tracemalloc.start()
    try:
        plan.gather(table, wire)
        plan.scatter(table, wire)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(wire) > 2_000_000 and peak < 100_000


@pytest.mark.parametrize(
    ("placement", "kind"),
    [
        (None, HostCopier),
        (Placement(axes=(0, 1, 2, 3)), HostCopier),
        (Placement(axes=(2, 0, 1, 3)), HostCopier),
        (Placement(axes=(0, 1, 2, 3), gap=1), StridedCopier),
        (Placement(axes=(0, 2, 3, 1)), StridedCopier),
        (PACKED, StridedCopier),
    ],
)
def test_chosen_only_where_elements_are_apart(placement: Placement | None, kind: type[HeadSliceCopier]) -> None:
    pool = packed_case(TokenOrder.HND, placement=placement).pool("cpu", seed=1)
    assert type(head_slice_copier(pool, heads=Span(begin=0, end=1), wire_dtype=DType.FLOAT32)) is kind


def test_one_transposed_buffer_is_enough() -> None:
    layout = KVLayout.uniform(num_layers=1, num_kv_heads=1, head_dim=8, dtype=DType.FLOAT32)
    k, v = torch.zeros(2, 4, 1, 8), torch.zeros(2, 8, 1, 4).transpose(1, 3)
    pool = PagedKVPool(layout=layout, shard=Shard(page_size=4), num_pages=2, buffers=[LayerBuffers(k=k, v=v)])
    assert type(head_slice_copier(pool, heads=Span(begin=0, end=1), wire_dtype=DType.FLOAT32)) is StridedCopier


@pytest.mark.parametrize("order", TokenOrder)
def test_slots_of_a_packed_pool_are_written_and_read(order: TokenOrder) -> None:
    pool = packed_case(order).pool("cpu", seed=1)
    slots, k, v = torch.tensor([[13, 2], [6, 23]]), torch.randn(4, 3, 8), torch.randn(4, 3, 8)
    pool.write(1, slots.view(-1), k, v)
    found_k, found_v = pool.read(1, slots)
    assert torch.equal(found_k, k.view(2, 2, 3, 8)) and torch.equal(found_v, v.view(2, 2, 3, 8))
    untouched = packed_case(order).pool("cpu", seed=1)
    untouched.write(1, slots.view(-1), k, v)
    assert_same_pools(pool, untouched)
    assert torch.equal(pool.buffer(0, is_v=False), untouched.buffer(0, is_v=False))
