"""Pools whose heads' elements are not adjacent: bit for bit as the reference, in the same bytes as from any other pool."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kernels.kernel_cases import Case, Placement, assert_agrees, assert_same_pools, cases, placements, tensors
from transfer.copy import HeadSliceCopier, head_slice_copier, strided_copy
from transfer.copy.compiled_copy import IS_BUILT, CompiledCopier
from transfer.copy.host_copy import HostCopier
from transfer.copy.strided_copy import StridedCopier
from transfer.layout import DType, KVLayout, LayerSpec, Range, Shard, TokenOrder
from transfer.pool.kv_pool import as_words

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
        heads=Range(begin=1, end=3),
        wire_dtype=DType.FLOAT32,
        pages=(4, 5, 0, 2, 1),
        tokens=Range(begin=2, end=19),
        num_tokens=19,
        placement=PACKED,
    )
    return replace(case, **changes)  # type: ignore[arg-type]


def test_nan_bits_survive_a_copy() -> None:
    case = packed_case(TokenOrder.HND, tokens=Range(begin=0, end=20))
    pool, target = case.pool("cpu", seed=1), case.pool("cpu", seed=1)
    for index, tensor in enumerate(tensors(pool)):
        generator = torch.Generator().manual_seed(index)
        as_words(tensor).copy_(torch.randint(0x7F800001, 0x7FFFFFFF, tensor.shape, generator=generator))
    wire, again = case.wire("cpu"), case.wire("cpu")
    case.plan(StridedCopier, pool).gather(case.table("cpu"), wire)
    case.plan(StridedCopier, target).scatter(case.table("cpu"), wire)
    case.plan(StridedCopier, target).gather(case.table("cpu"), again)
    assert torch.equal(wire, again) and bool(wire[:-24].view(torch.float32).isnan().all())


ADJACENT = CompiledCopier if IS_BUILT else HostCopier


@pytest.mark.parametrize(
    ("placement", "kind"),
    [
        (None, ADJACENT),
        (Placement(axes=(0, 1, 2, 3)), ADJACENT),
        (Placement(axes=(2, 0, 1, 3)), ADJACENT),
        (Placement(axes=(0, 1, 2, 3), gap=1), StridedCopier),
        (Placement(axes=(0, 2, 3, 1)), StridedCopier),
        (PACKED, StridedCopier),
    ],
)
def test_chosen_only_where_elements_are_apart(placement: Placement | None, kind: type[HeadSliceCopier]) -> None:
    pool = packed_case(TokenOrder.HND, placement=placement).pool("cpu", seed=1)
    assert type(head_slice_copier(pool, heads=Range(begin=0, end=1), wire_dtype=DType.FLOAT32)) is kind


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
