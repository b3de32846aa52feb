"""Random gathers and scatters: what every implementation is compared on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from hypothesis import strategies as st
from torch import Tensor

from transfer.kernels.copier import CopyPlan, Digest, HeadSliceCopier
from transfer.kernels.digest import DIGEST_WORDS, DIGEST_XXH3, WORD_BYTES, HostDigest
from transfer.kernels.digest import digest as digest_of
from transfer.kernels.reference import ReferenceCopier, reference_words_sum
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
START = -7  # of a sum: what was there stays in it
MARGIN_BYTES = 24  # behind the payload: must stay as it is


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Case:
    """One pool geometry and one plan.

    Args:
        pages: What the buffers' tokens lie in.
        tokens: Counted from the first of these pages.
        first_token: The request's token that is the first of the first page.
        first_page: Entries of the page table before `pages`, which are no pages.
    """

    layout: KVLayout
    shard: Shard
    num_pages: int
    heads: Span
    wire_dtype: DType
    pages: tuple[int, ...]
    tokens: Span
    num_tokens: int
    first_token: int = 0
    first_page: int = 0
    scales: Mapping[tuple[int, bool], float] = field(default_factory=dict)

    @property
    def buffers(self) -> tuple[WireBuffer, ...]:
        layers = Span(begin=0, end=self.layout.num_layers)
        heads = HeadSlice(source_start=self.heads.begin, target_start=0, count=len(self.heads))
        route = Route(index=0, prefill_rank=0, decode_rank=0, layers=layers, heads=heads)
        buffers = wire_buffers(
            self.layout,
            route,
            tokens=moved(self.tokens, self.first_token),
            layers=layers,
            num_tokens=self.first_token + self.num_tokens,
            dtype=self.wire_dtype,
        )
        return tuple(replace(buffer, tokens=moved(buffer.tokens, -self.first_token)) for buffer in buffers)

    def plan(self, implementation: type[HeadSliceCopier], pool: PagedKVPool) -> CopyPlan:
        return implementation(pool, heads=self.heads, wire_dtype=self.wire_dtype, scales=self.scales).plan(self.buffers)

    def pool(self, device: str, seed: int) -> PagedKVPool:
        pool = PagedKVPool(layout=self.layout, shard=self.shard, num_pages=self.num_pages, device=device)
        fill(pool, seed)
        return pool

    def table(self, device: str) -> Tensor:
        return torch.tensor((*(-1,) * self.first_page, *self.pages), dtype=torch.int64, device=device)

    def wire(self, device: str) -> Tensor:
        buffers = self.buffers
        num_bytes = buffers[-1].offset_bytes + buffers[-1].num_bytes if buffers else 0
        return torch.full((num_bytes + MARGIN_BYTES,), SENTINEL, dtype=torch.uint8, device=device)


def moved(tokens: Span, by: int) -> Span:
    return Span(begin=tokens.begin + by, end=tokens.end + by)


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


def assert_agrees(case: Case, implementation: type[HeadSliceCopier], device: str = "cpu", *, has_kernels: bool = False) -> None:
    """Gather and scatter of `implementation` give the reference's bytes and digest, and leave every other byte alone.

    Args:
        has_kernels: Whether its digests are tensors, and not `HostDigest`s.
    """
    source = case.pool(device, seed=1)
    table, expected, first = case.table(device), case.wire(device), case.first_page
    case.plan(ReferenceCopier, source).gather(table, expected, first_page=first)
    plan = case.plan(implementation, source)
    for digest in digests(plan, device, has_kernels=has_kernels):
        wire = case.wire(device)
        plan.gather(table, wire, first_page=first, digest=digest)
        assert torch.equal(wire, expected)
        assert_digest(digest, wire, plan)
        reference, target = case.pool(device, seed=2), case.pool(device, seed=2)
        case.plan(ReferenceCopier, reference).scatter(table, expected, first_page=first)
        onto = case.plan(implementation, target)
        digest = next(again for again in digests(onto, device, has_kernels=has_kernels) if type(again) is type(digest))
        onto.scatter(table, expected, first_page=first, digest=digest)
        assert_same_pools(target, reference)
        assert_digest(digest, expected, onto)


def digests(plan: CopyPlan, device: str, *, has_kernels: bool) -> list[Digest | None]:
    """What a call of the plan can be given: nothing, and each kind of digest that it can make."""
    if not plan.can_digest:
        return [None]
    if has_kernels:
        return [None, torch.full((1,), START, dtype=torch.int64, device=device)]
    return [None, HostDigest(DIGEST_XXH3), HostDigest(DIGEST_WORDS)]


def assert_digest(found: Digest | None, wire: Tensor, plan: CopyPlan) -> None:
    """As the definitions say of the plan's bytes; a sum goes on from what it was."""
    if isinstance(found, HostDigest):
        assert found.value() == digest_of(wire[: plan.num_wire_bytes].cpu(), found.algorithm)
    elif found is not None:
        # Each buffer is whole words, at its place in the wire.
        sums = [
            reference_words_sum(wire[one.offset_bytes : one.offset_bytes + one.num_bytes], one.offset_bytes // WORD_BYTES)
            for one in plan.buffers
        ]
        assert (int(found) - START - sum(sums)) % 2**64 == 0


@st.composite
def cases(draw: st.DrawFn, *, max_page_size: int = 20, max_pages: int = 9, max_dim: int = 24) -> Case:
    num_heads = draw(st.integers(1, 6))
    dims = st.one_of(st.integers(1, max_dim), st.sampled_from([dim for dim in (8, 16, 64) if dim <= max_dim] or [1]))
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
    keys = st.tuples(st.integers(0, len(specs) - 1), st.booleans())
    scales = st.dictionaries(keys, st.sampled_from((0.25, 0.37, 1.0, 1.7, 3e-3)), max_size=4)
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
        tokens=Span(begin=begin, end=end),
        first_token=draw(st.sampled_from((0, 0, 5))),
        first_page=draw(st.sampled_from((0, 0, 3))),
        num_tokens=end + draw(st.sampled_from((0, 0, 30))),
        scales=draw(st.one_of(st.just({}), scales)),
    )
