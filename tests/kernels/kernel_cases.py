"""Random gathers and scatters: what every implementation is compared on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import cast

import torch
from hypothesis import strategies as st
from torch import Tensor

from transfer.copy.copier import CopyPlan, Digest, HeadSliceCopier, WireMemory
from transfer.copy.digest import DIGEST_WORDS, DIGEST_XXH3, WORD_BYTES, HostDigest
from transfer.copy.digest import digest as digest_of
from transfer.copy.torch_copy import TorchCopier, words_sum
from transfer.layout import (
    DType,
    HeadSlice,
    KVLayout,
    LayerKind,
    LayerSpec,
    Range,
    Route,
    Shard,
    TokenOrder,
    WireBuffer,
    wire_buffers,
)
from transfer.pool.kv_pool import TORCH_DTYPES, LayerBuffers, PagedKVPool, as_words

SENTINEL = 0xA5
START = -7  # of a sum: what was there stays in it
MARGIN_BYTES = 24  # behind the payload: must stay as it is


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Where the elements of an engine's own tensors lie.

    Args:
        axes: Dimensions of [page, token, head, dim] from the outermost in memory to the innermost.
        gap: Elements between two of the innermost dimension.
        is_packed: K and V of a page and head beside each other, K as [dim, token] and V as [token, dim]: vLLM's attention on a
            CPU. `axes` and `gap` are then without effect.
    """

    axes: tuple[int, ...] = (0, 2, 3, 1)
    gap: int = 0
    is_packed: bool = False

    def buffers(self, shape: Sequence[int], dims: Sequence[int], dtype: torch.dtype) -> LayerBuffers:
        """K and V (one buffer: K alone), [page, token, head, dim] each, zeroed.

        Args:
            shape: Pages, tokens of a page, heads.
            dims: Elements of K and V, or of K alone.
        """
        pages, tokens, heads = shape
        if self.is_packed:
            both = torch.zeros(pages, heads, tokens * sum(dims), dtype=dtype)
            parts = both.split([tokens * dim for dim in dims], dim=2)
            views = [parts[0].unflatten(2, (dims[0], tokens)).permute(0, 3, 1, 2)]
            views += [part.unflatten(2, (tokens, dims[1])).permute(0, 2, 1, 3) for part in parts[1:]]
        else:
            views = [self._placed((pages, tokens, heads, dim), dtype) for dim in dims]
        return LayerBuffers(k=views[0], v=views[1] if len(views) == 2 else None)

    def _placed(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        sizes = [shape[axis] for axis in self.axes]
        spaced = torch.zeros(*sizes, 1 + self.gap, dtype=dtype)[..., 0]
        return spaced.permute([self.axes.index(axis) for axis in range(4)])


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Case:
    """One pool geometry and one plan.

    Args:
        placement: Where the pool's elements lie; None: as our own pools have them.
        pages: What the buffers' tokens lie in.
        tokens: Counted from the first of these pages.
        first_token: The request's token that is the first of the first page.
        first_page: Entries of the page table before `pages`, which are no pages.
    """

    layout: KVLayout
    shard: Shard
    num_pages: int
    heads: Range
    wire_dtype: DType
    pages: tuple[int, ...]
    tokens: Range
    num_tokens: int
    first_token: int = 0
    first_page: int = 0
    scales: Mapping[tuple[int, bool], float] = field(default_factory=dict)
    placement: Placement | None = None

    @property
    def buffers(self) -> tuple[WireBuffer, ...]:
        layers = Range(begin=0, end=self.layout.num_layers)
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
        buffers = None if self.placement is None else [self._placed(spec, self.placement) for spec in self.layout.layers]
        pool = PagedKVPool(layout=self.layout, shard=self.shard, num_pages=self.num_pages, device=device, buffers=buffers)
        fill(pool, seed)
        return pool

    def _placed(self, spec: LayerSpec, placement: Placement) -> LayerBuffers:
        shape = (self.num_pages, self.shard.page_size, spec.num_kv_heads)
        dims = (spec.k_head_dim, spec.v_head_dim)[: spec.num_buffers]
        found = placement.buffers(shape, dims, TORCH_DTYPES[self.layout.dtype])
        if self.shard.order is TokenOrder.NHD:
            return found
        return LayerBuffers(k=found.k.transpose(1, 2), v=None if found.v is None else found.v.transpose(1, 2))

    def table(self, device: str) -> Tensor:
        return torch.tensor((*(-1,) * self.first_page, *self.pages), dtype=torch.int64, device=device)

    def wire(self, device: str) -> Tensor:
        buffers = self.buffers
        num_bytes = buffers[-1].offset_bytes + buffers[-1].num_bytes if buffers else 0
        return torch.full((num_bytes + MARGIN_BYTES,), SENTINEL, dtype=torch.uint8, device=device)


def moved(tokens: Range, by: int) -> Range:
    return Range(begin=tokens.begin + by, end=tokens.end + by)


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


def address_only(wire: Tensor) -> WireMemory:
    """Return the memory of a wire as that of a peer is given."""
    return cast(WireMemory, SimpleNamespace(data_ptr=wire.data_ptr, numel=wire.numel))


def assert_same_pools(left: PagedKVPool, right: PagedKVPool) -> None:
    for ours, theirs in zip(tensors(left), tensors(right), strict=True):
        assert torch.equal(as_words(ours), as_words(theirs))
        assert torch.equal(memory_from(ours), memory_from(theirs))


def memory_from(tensor: Tensor) -> Tensor:
    """All bytes of the allocation that a tensor lies in, from its first on, and then those before it: uint8 [bytes].

    On a GPU the pools of two cases begin at different places of theirs.
    """
    memory = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
    return memory.roll(-tensor.storage_offset() * tensor.element_size())


def assert_agrees(case: Case, implementation: type[HeadSliceCopier], device: str = "cpu", *, has_kernels: bool = False) -> None:
    """Gather and scatter of `implementation` give the reference's bytes and digest, and leave every other byte alone, gaps too.

    Args:
        has_kernels: Whether its digests are tensors, and not `HostDigest`s.
    """
    source = case.pool(device, seed=1)
    table, expected, first = case.table(device), case.wire(device), case.first_page
    case.plan(TorchCopier, source).gather(table, expected, first_page=first)
    plan = case.plan(implementation, source)
    for digest in digests(plan, device, has_kernels=has_kernels):
        wire = case.wire(device)
        plan.gather(table, wire, first_page=first, digest=digest)
        assert torch.equal(wire, expected)
        assert_digest(digest, wire, plan)
        reference, target = case.pool(device, seed=2), case.pool(device, seed=2)
        case.plan(TorchCopier, reference).scatter(table, expected, first_page=first)
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
            int(words_sum(wire[one.offset_bytes : one.offset_bytes + one.num_bytes], one.offset_bytes // WORD_BYTES))
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
        heads=Range(begin=head, end=draw(st.integers(head + 1, num_heads))),
        wire_dtype=wire_dtype,
        pages=tuple(used),
        tokens=Range(begin=begin, end=end),
        first_token=draw(st.sampled_from((0, 0, 5))),
        first_page=draw(st.sampled_from((0, 0, 3))),
        num_tokens=end + draw(st.sampled_from((0, 0, 30))),
        scales=draw(st.one_of(st.just({}), scales)),
    )


def placements() -> st.SearchStrategy[Placement]:
    """Every order of the dimensions, with and without gaps, and vLLM's."""
    placed = st.builds(Placement, axes=st.permutations(range(4)).map(tuple), gap=st.integers(0, 2))
    return st.one_of(st.just(Placement(is_packed=True)), st.just(Placement()), placed)
