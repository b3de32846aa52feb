"""The reference against element-by-element loops, and conversions between dtypes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from tests.kernels.kernel_cases import SENTINEL, Case, cases
from transfer.copy.torch_copy import TorchCopier
from transfer.errors import LayoutError
from transfer.layout import DType, TokenOrder
from transfer.pool.kv_pool import TORCH_DTYPES, PagedKVPool, convert


def element(pool: PagedKVPool, buffer: Tensor, slot: int, head: int) -> Tensor:
    page, offset = divmod(slot, pool.page_size)
    return buffer[page, offset, head] if pool.order is TokenOrder.NHD else buffer[page, head, offset]


def place(case: Case, token: int) -> int:
    return case.pages[token // case.shard.page_size] * case.shard.page_size + token % case.shard.page_size


@settings(max_examples=60)
@given(case=cases(max_page_size=4, max_pages=4, max_dim=5))
def test_gather_is_what_the_loops_say(case: Case) -> None:
    pool, out = case.pool("cpu", seed=3), case.wire("cpu")
    case.plan(TorchCopier, pool).gather(case.table("cpu"), out, first_page=case.first_page)
    rows = [
        convert(
            element(pool, pool.buffer(buffer.layer, is_v=buffer.is_v), place(case, token), head),
            case.wire_dtype,
            scale=case.scales.get((buffer.layer, buffer.is_v), 1.0),
        )
        for buffer in case.buffers
        for token in range(buffer.tokens.begin, buffer.tokens.end)
        for head in range(case.heads.begin, case.heads.end)
    ]
    payload = torch.cat([row.contiguous().view(torch.uint8) for row in rows]) if rows else torch.empty(0, dtype=torch.uint8)
    assert torch.equal(out[: len(payload)], payload)
    assert bool((out[len(payload) :] == SENTINEL).all())


@settings(max_examples=60)
@given(case=cases(max_page_size=4, max_pages=4, max_dim=5))
def test_scatter_is_what_the_loops_say(case: Case) -> None:
    wire = case.wire("cpu")
    source = case.pool("cpu", seed=3)
    case.plan(TorchCopier, source).gather(case.table("cpu"), wire, first_page=case.first_page)
    target, expected = case.pool("cpu", seed=4), case.pool("cpu", seed=4)
    case.plan(TorchCopier, target).scatter(case.table("cpu"), wire, first_page=case.first_page)
    for buffer in case.buffers:
        rows = wire[buffer.offset_bytes : buffer.offset_bytes + buffer.num_bytes].view(TORCH_DTYPES[case.wire_dtype])
        rows = rows.view(len(buffer.tokens), len(case.heads), -1)
        for token in range(buffer.tokens.begin, buffer.tokens.end):
            for head in range(case.heads.begin, case.heads.end):
                destination = element(expected, expected.buffer(buffer.layer, is_v=buffer.is_v), place(case, token), head)
                row = rows[token - buffer.tokens.begin, head - case.heads.begin]
                destination.copy_(convert(row, expected.element, scale=case.scales.get((buffer.layer, buffer.is_v), 1.0)))
    for layer in range(case.layout.num_layers):
        for is_v in (False, True)[: case.layout.layers[layer].num_buffers]:
            assert torch.equal(
                target.buffer(layer, is_v=is_v).view(torch.uint8), expected.buffer(layer, is_v=is_v).view(torch.uint8)
            )


def test_float16_saturates() -> None:
    values = torch.tensor([1e5, -1e9, 65504.0, 65519.0, 65520.0, float("inf"), float("-inf"), float("nan"), 0.0])
    for source in (torch.float32, torch.bfloat16):
        found = convert(values.to(source), DType.FLOAT16)
        assert found[[0, 1, 5, 6]].tolist() == [65504.0, -65504.0, 65504.0, -65504.0]
        assert found.isfinite().tolist() == [True] * 7 + [False, True] and found[7].isnan()


def test_float8_saturates() -> None:
    values = torch.tensor([1e9, -1e9, 448.0, 449.0, float("inf"), float("nan"), 0.0])
    converted = convert(values, DType.FLOAT8_E4M3).float()
    assert converted[:5].tolist() == [448.0, -448.0, 448.0, 448.0, 448.0]
    assert bool(converted[5].isnan()) and converted[6] == 0.0


def test_a_scale_widens_what_it_narrowed() -> None:
    values = torch.tensor([900.0, -112.0, 0.5])
    narrow = convert(values, DType.FLOAT8_E4M3, scale=4.0)
    assert narrow.float().tolist() == [224.0, -28.0, 0.125]
    assert convert(narrow, DType.FLOAT32, scale=4.0).tolist() == [896.0, -112.0, 0.5]
    assert convert(values.bfloat16(), DType.FLOAT16, scale=4.0).tolist() == [900.0, -112.0, 0.5]  # neither is narrower
    assert convert(torch.tensor([1e4]), DType.FLOAT8_E4M3, scale=4.0).item() == 448.0
    for scale in (0.0, -1.0, 1e31, float("nan")):
        with pytest.raises(LayoutError, match="scale is"):
            convert(values, DType.FLOAT8_E4M3, scale=scale)


@pytest.mark.parametrize(("source", "target"), [(torch.int8, DType.BFLOAT16), (torch.float32, DType.INT8)])
def test_int8_is_never_converted(source: torch.dtype, target: DType) -> None:
    with pytest.raises(LayoutError, match="int8 KV carries no scale"):
        convert(torch.zeros(3, dtype=source), target)
    same = torch.ones(3, dtype=torch.int8)
    assert convert(same, DType.INT8) is same
