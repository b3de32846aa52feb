"""The reference against element-by-element loops, and whole transfers between differently cut pools."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from tests.kernels.kernel_cases import SENTINEL, Case, cases
from transfer.errors import LayoutError
from transfer.kernels import head_slice_copier
from transfer.kernels.reference import ReferenceCopier
from transfer.kv_pool import TORCH_DTYPES, PagedKVPool, convert
from transfer.layout import DType, KVLayout, LayerKind, LayerSpec, Shard, Span, TokenOrder, routes, wire_buffers, wire_bytes
from transfer.layout import wire_dtype as narrower


def element(pool: PagedKVPool, buffer: Tensor, slot: int, head: int) -> Tensor:
    page, offset = divmod(slot, pool.page_size)
    return buffer[page, offset, head] if pool.order is TokenOrder.NHD else buffer[page, head, offset]


def place(case: Case, token: int) -> int:
    return case.pages[token // case.shard.page_size] * case.shard.page_size + token % case.shard.page_size


@settings(max_examples=60)
@given(case=cases(max_page_size=4, max_pages=4, max_dim=5))
def test_gather_is_what_the_loops_say(case: Case) -> None:
    pool, out = case.pool("cpu", seed=3), case.wire("cpu")
    case.plan(ReferenceCopier, pool).gather(case.table("cpu"), out, first_page=case.first_page)
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
    case.plan(ReferenceCopier, source).gather(case.table("cpu"), wire, first_page=case.first_page)
    target, expected = case.pool("cpu", seed=4), case.pool("cpu", seed=4)
    case.plan(ReferenceCopier, target).scatter(case.table("cpu"), wire, first_page=case.first_page)
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


MIXED = KVLayout(
    layers=(
        LayerSpec(num_kv_heads=12, k_head_dim=8, v_head_dim=4),
        LayerSpec(kind=LayerKind.SLIDING_WINDOW, num_kv_heads=12, k_head_dim=8, v_head_dim=8, window_tokens=9),
        LayerSpec(kind=LayerKind.MLA, num_kv_heads=1, k_head_dim=10, v_head_dim=0),
        LayerSpec(num_kv_heads=2, k_head_dim=6, v_head_dim=6),
    ),
    dtype=DType.BFLOAT16,
)


@pytest.mark.parametrize(
    ("prefill", "decode"),
    [
        (Shard(tp_size=4, page_size=16), Shard(tp_size=2, page_size=32, order=TokenOrder.HND)),
        (Shard(tp_size=2, page_size=64), Shard(tp_size=4, page_size=1)),
        (Shard(tp_size=3, page_size=5, order=TokenOrder.HND), Shard(tp_size=2, pp_size=2, page_size=7)),
        (Shard(tp_size=1, pp_size=3, page_size=3), Shard(tp_size=6, page_size=256, dtype=DType.FLOAT32)),
    ],
)
def test_a_prompt_arrives_whole_in_a_differently_cut_tier(prefill: Shard, decode: Shard) -> None:
    tokens, start = 45, 0
    generator = torch.Generator().manual_seed(5)
    truth = {
        (layer, is_v): torch.randn(
            (tokens, spec.num_kv_heads, spec.v_head_dim if is_v else spec.k_head_dim), generator=generator
        ).bfloat16()
        for layer, spec in enumerate(MIXED.layers)
        for is_v in (False, True)
    }
    sources = [filled(prefill.at(rank), truth, tokens) for rank in range(prefill.num_ranks)]
    targets = [empty(decode.at(rank), tokens, seed=rank) for rank in range(decode.num_ranks)]
    dtype = narrower(MIXED, prefill, decode)
    everything = Span(begin=0, end=MIXED.num_layers)
    for route in routes(MIXED, prefill, decode):
        for span in (Span(begin=start, end=20), Span(begin=20, end=tokens)):
            what: dict[str, Any] = {"tokens": span, "layers": everything, "num_tokens": tokens, "dtype": dtype}
            wire = torch.zeros(wire_bytes(MIXED, route, **what), dtype=torch.uint8)
            buffers, count = wire_buffers(MIXED, route, **what), route.heads.count
            (source, pages), (target, target_pages) = sources[route.prefill_rank], targets[route.decode_rank]
            held = Span(begin=route.heads.source_start, end=route.heads.source_start + count)
            head_slice_copier(source, heads=held, wire_dtype=dtype).plan(buffers).gather(pages, wire)
            held = Span(begin=route.heads.target_start, end=route.heads.target_start + count)
            head_slice_copier(target, heads=held, wire_dtype=dtype).plan(buffers).scatter(target_pages, wire)
    for pool, pages in targets:
        for layer in pool.layers:
            spec = MIXED.layers[layer]
            begin = tokens - spec.window_tokens if spec.kind is LayerKind.SLIDING_WINDOW else 0
            k, v = pool.read(layer, slots(pages, pool.page_size, tokens)[begin:])
            heads = pool.shard.heads(spec.num_kv_heads)
            assert torch.equal(k, truth[layer, False][begin:, heads.begin : heads.end].to(pool.dtype))
            assert torch.equal(v, truth[layer, True][begin:, heads.begin : heads.end].to(pool.dtype))


def slots(pages: Tensor, page_size: int, tokens: int) -> Tensor:
    return (pages[:, None] * page_size + torch.arange(page_size)).reshape(-1)[:tokens]


def empty(shard: Shard, tokens: int, seed: int) -> tuple[PagedKVPool, Tensor]:
    needed = math.ceil(tokens / shard.page_size)
    pool = PagedKVPool(layout=MIXED, shard=shard, num_pages=needed + 2)
    return pool, torch.randperm(needed + 2, generator=torch.Generator().manual_seed(seed))[:needed]


def filled(shard: Shard, truth: dict[tuple[int, bool], Tensor], tokens: int) -> tuple[PagedKVPool, Tensor]:
    pool, pages = empty(shard, tokens, seed=100 + shard.rank)
    for layer in pool.layers:
        heads = shard.heads(MIXED.layers[layer].num_kv_heads)
        k, v = (truth[layer, is_v][:, heads.begin : heads.end] for is_v in (False, True))
        pool.write(layer, slots(pages, pool.page_size, tokens), k, v)
    return pool, pages


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
