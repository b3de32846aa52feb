"""The yardstick of strided rows: which cases have one, and that it moves all of their bytes."""

from __future__ import annotations

import pytest
import torch

from bench.kernel_setting import Geometry, Side
from bench.strided_copy import STRIDED_TORCH, strided_copies
from transfer.layout import DType, TokenOrder


def geometry(*, held: tuple[int, int], order: TokenOrder = TokenOrder.NHD, wire_dtype: DType = DType.BFLOAT16) -> Geometry:
    return Geometry(
        name="small",
        num_layers=1,
        held=held,
        heads=2,
        num_tokens=8,
        page_size=4,
        head_dim=16,
        order=order,
        wire_dtype=wire_dtype,
    )


WIRE_BYTES = 2 * 8 * 2 * 16 * 2  # K and V, tokens, heads, elements


@pytest.mark.parametrize("order", list(TokenOrder))
@pytest.mark.parametrize(("held", "side"), [((4, 2), "gather"), ((2, 4), "scatter")])
def test_part_of_each_row_is_copied(order: TokenOrder, held: tuple[int, int], side: Side) -> None:
    memory = torch.full((WIRE_BYTES + 16,), 7, dtype=torch.uint8)
    wire = memory[-memory.data_ptr() % 16 :][:WIRE_BYTES]
    strided_copies(geometry(held=held, order=order), side, wire)[STRIDED_TORCH]()
    assert bool(wire.eq(0 if side == "gather" else 7).all())
