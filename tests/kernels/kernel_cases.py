"""Random gathers and scatters: what every implementation is compared on."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from hypothesis import strategies as st
from torch import Tensor

from transfer.kernels.copier import HeadSliceCopier
from transfer.kernels.reference import ReferenceCopier
from transfer.kv_pool import PagedKVPool, as_words
from transfer.layout import (
    DType,
    HeadSlice,
    KVLayout,
    LayerKind,
    LayerSpec,
    Route,
    Shard,
    Span,
    TokenOrder,
    WireBuffer,
    wire_buffers,
)

SENTINEL = 0xA5
MARGIN_BYTES = 24  # behind the payload: must stay as it is


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Case:
    """One pool geometry and one call."""

    layout: KVLayout
    shard: Shard
    num_pages: int
    heads: Span
    wire_dtype: DType
    pages: tuple[int, ...]
    tokens: Span
    first_token: int
    num_tokens: int

    @property
    def buffers(self) -> tuple[WireBuffer, ...]:
        layers = Span(begin=0, end=self.layout.num_layers)
        heads = HeadSlice(source_start=self.heads.begin, target_start=0, count=len(self.heads))
        route = Route(index=0, prefill_rank=0, decode_rank=0, layers=layers, heads=heads)
        return wire_buffers(
            self.layout, route, tokens=self.tokens, layers=layers, num_tokens=self.num_tokens, dtype=self.wire_dtype
        )

    def pool(self, device: str, seed: int) -> PagedKVPool:
        pool = PagedKVPool(layout=self.layout, shard=self.shard, num_pages=self.num_pages, device=device)
        fill(pool, seed)
        return pool

    def table(self, device: str) -> Tensor:
        return torch.tensor(self.pages, dtype=torch.int64, device=device)

    def wire(self, device: str) -> Tensor:
        buffers = self.buffers
        num_bytes = buffers[-1].offset_bytes + buffers[-1].num_bytes if buffers else 0
        return torch.full((num_bytes + MARGIN_BYTES,), SENTINEL, dtype=torch.uint8, device=device)


def fill(pool: PagedKVPool, seed: int) -> None:
    """Random numbers of all magnitudes, without NaN; far beyond float8's range where the dtype can hold them."""
    generator = torch.Generator().manual_seed(seed)
    for tensor in tensors(pool):
        if pool.dtype is torch.int8:
            tensor.copy_(torch.randint(-128, 128, tensor.shape, generator=generator))
            continue
        values = torch.randn(tensor.shape, generator=generator) * 10 ** (torch.rand(tensor.shape, generator=generator) * 8 - 5)
        tensor.copy_(values.clamp(-448, 448).to(pool.dtype) if pool.dtype is torch.float8_e4m3fn else values.to(pool.dtype))


def tensors(pool: PagedKVPool) -> list[Tensor]:
    return [
        pool.buffer(layer, is_v=is_v) for layer in pool.layers for is_v in (False, True)[: pool.layout.layers[layer].num_buffers]
    ]


def assert_same_pools(left: PagedKVPool, right: PagedKVPool) -> None:
    for ours, theirs in zip(tensors(left), tensors(right), strict=True):
        assert torch.equal(as_words(ours), as_words(theirs))


def assert_agrees(case: Case, implementation: type[HeadSliceCopier], device: str = "cpu") -> None:
    """Gather and scatter of `implementation` give the reference's bytes, and leave every other byte alone."""
    source = case.pool(device, seed=1)
    table, expected, wire = case.table(device), case.wire(device), case.wire(device)
    ReferenceCopier(source, heads=case.heads, wire_dtype=case.wire_dtype).gather(
        table, case.buffers, expected, first_token=case.first_token
    )
    implementation(source, heads=case.heads, wire_dtype=case.wire_dtype).gather(
        table, case.buffers, wire, first_token=case.first_token
    )
    assert torch.equal(wire, expected)
    reference, target = case.pool(device, seed=2), case.pool(device, seed=2)
    ReferenceCopier(reference, heads=case.heads, wire_dtype=case.wire_dtype).scatter(
        table, case.buffers, expected, first_token=case.first_token
    )
    implementation(target, heads=case.heads, wire_dtype=case.wire_dtype).scatter(
        table, case.buffers, expected, first_token=case.first_token
    )
    assert_same_pools(target, reference)


@st.composite
def cases(draw: st.DrawFn, *, max_page_size: int = 20, max_pages: int = 9, max_dim: int = 24) -> Case:
    num_heads = draw(st.integers(1, 6))
    dims = st.integers(1, max_dim)
    mha = LayerSpec(num_kv_heads=num_heads, k_head_dim=draw(dims), v_head_dim=draw(st.one_of(st.just(0), dims)))
    specs = [mha] * draw(st.integers(1, 3))
    if draw(st.booleans()):
        specs.append(
            LayerSpec(
                kind=LayerKind.SLIDING_WINDOW,
                num_kv_heads=num_heads,
                k_head_dim=draw(dims),
                v_head_dim=draw(dims),
                window_tokens=draw(st.integers(1, 40)),
            )
        )
    if num_heads == 1 and draw(st.booleans()):
        specs.append(LayerSpec(kind=LayerKind.MLA, num_kv_heads=1, k_head_dim=draw(dims), v_head_dim=0))
    element = draw(st.sampled_from(DType))
    convertible = [dtype for dtype in DType if dtype is not DType.INT8]
    wire_dtype = element if element is DType.INT8 else draw(st.one_of(st.just(element), st.sampled_from(convertible)))
    page_size = draw(st.integers(1, max_page_size))
    num_pages = draw(st.integers(1, max_pages))
    pages = draw(st.permutations(range(num_pages))) if draw(st.booleans()) else list(range(num_pages))
    used = pages[: draw(st.integers(1, num_pages))]
    first_token = draw(st.sampled_from((0, 0, 5)))
    begin = draw(st.integers(0, len(used) * page_size - 1))
    end = draw(st.integers(begin + 1, len(used) * page_size))
    head = draw(st.integers(0, num_heads - 1))
    return Case(
        layout=KVLayout(layers=tuple(specs), dtype=element),
        shard=Shard(page_size=page_size, order=draw(st.sampled_from(TokenOrder))),
        num_pages=num_pages,
        heads=Span(begin=head, end=draw(st.integers(head + 1, num_heads))),
        wire_dtype=wire_dtype,
        pages=tuple(used),
        tokens=Span(begin=first_token + begin, end=first_token + end),
        first_token=first_token,
        num_tokens=first_token + end + draw(st.sampled_from((0, 0, 30))),
    )
