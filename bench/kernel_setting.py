"""What `bench.kernels` copies: head slices of models' pools, as between tiers of different tensor parallelism."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from transfer.copy import CopyPlan, Digest, HeadSliceCopier
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
from transfer.pool.kv_pool import PagedKVPool
from transfer.pool.staging import StagingBuffer

Side = Literal["gather", "scatter"]
SEED = 1
SLEEP_CYCLES = 1_000_000
"""Of a device before a call is timed: some 0.5 ms, longer than the host needs for any call that is prepared."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Geometry:
    """One route's copies on both sides.

    Attributes:
        held: KV heads of a prefill rank and of a decode rank; the first `heads` of them travel.
        head_dim: Of K and V, or of the latent.
        is_latent: Layers have K alone.
        dtype: Of both pools; `wire_dtype` on the wire.
        scale: Of every layer.
        is_consecutive: Pages are in order, and not in random order.
        has_peer: SGLang's staging kernels can do it too.
    """

    name: str
    num_layers: int
    held: tuple[int, int]
    heads: int
    num_tokens: int
    page_size: int
    head_dim: int = 128
    is_latent: bool = False
    order: TokenOrder = TokenOrder.NHD
    dtype: DType = DType.BFLOAT16
    wire_dtype: DType = DType.BFLOAT16
    scale: float = 1.0
    is_consecutive: bool = False
    has_peer: bool = False

    @property
    def is_conversion(self) -> bool:
        return self.dtype is not self.wire_dtype

    def layout(self, num_heads: int) -> KVLayout:
        spec = LayerSpec(
            kind=LayerKind.MLA if self.is_latent else LayerKind.ATTENTION,
            num_kv_heads=num_heads,
            k_head_dim=self.head_dim,
            v_head_dim=0 if self.is_latent else self.head_dim,
        )
        return KVLayout(layers=(spec,) * self.num_layers, dtype=self.dtype)

    def buffers(self) -> tuple[WireBuffer, ...]:
        layers, tokens = Range(begin=0, end=self.num_layers), Range(begin=0, end=self.num_tokens)
        heads = HeadSlice(source_start=0, target_start=0, count=self.heads)
        route = Route(index=0, prefill_rank=0, decode_rank=0, layers=layers, heads=heads)
        layout = self.layout(self.heads)
        return wire_buffers(layout, route, tokens=tokens, layers=layers, num_tokens=self.num_tokens, dtype=self.wire_dtype)

    def scales(self) -> Mapping[tuple[int, bool], float]:
        if self.scale == 1.0:
            return {}
        return {(layer, is_v): self.scale for layer in range(self.num_layers) for is_v in (False, True)}

    def smaller(self, factor: int) -> Geometry:
        """With fewer tokens and layers: to see that it runs."""
        tokens = max(self.page_size, self.num_tokens // factor // self.page_size * self.page_size)
        layers = max(2, self.num_layers // factor)
        return replace(self, name=f"{self.name}, cut to {tokens}", num_tokens=tokens, num_layers=layers)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Prepared:
    """One side's plan, and what its calls take."""

    geometry: Geometry
    side: Side
    pool: PagedKVPool
    plan: CopyPlan
    pages: Tensor
    wire: Tensor

    def copy(self, digest: Digest | None = None) -> None:
        move = self.plan.gather if self.side == "gather" else self.plan.scatter
        move(self.pages, self.wire, digest=digest)

    @property
    def traffic_bytes(self) -> int:
        """Bytes of a copy that reads and writes as much as this does: the wire's, where nothing is converted."""
        sizes = self.geometry.dtype.num_bytes, self.geometry.wire_dtype.num_bytes
        return self.plan.num_wire_bytes // sizes[1] * sum(sizes) // 2


def prepare(geometry: Geometry, side: Side, device: str, copier: Callable[..., HeadSliceCopier]) -> Prepared:
    """A pool of twice as many pages as are used, which are in random order, filled with random numbers."""
    held = geometry.held[0 if side == "gather" else 1]
    num_pages = -(-geometry.num_tokens // geometry.page_size)
    shard = Shard(page_size=geometry.page_size, order=geometry.order)
    pool = PagedKVPool(layout=geometry.layout(held), shard=shard, num_pages=2 * num_pages, device=device)
    for layer in pool.layers:
        for is_v in (False, True)[: pool.layout.layers[layer].num_buffers]:
            pool.buffer(layer, is_v=is_v).uniform_(-4.0, 4.0)
    heads = Range(begin=0, end=geometry.heads)
    plan = copier(pool, heads=heads, wire_dtype=geometry.wire_dtype, scales=geometry.scales()).plan(geometry.buffers())
    order = torch.randperm(2 * num_pages, generator=torch.Generator().manual_seed(SEED))[:num_pages]
    pages = torch.arange(num_pages) if geometry.is_consecutive else order
    wire = StagingBuffer(plan.num_wire_bytes, device=device).tensor
    return Prepared(geometry=geometry, side=side, pool=pool, plan=plan, pages=pages.to(device), wire=wire)


def _llama70(name: str, held: tuple[int, int], heads: int, page_size: int, **more: Any) -> Geometry:
    name = f"Llama-3-70B {name}, 4096 tokens, pages of {page_size}"
    return Geometry(name=name, num_layers=80, held=held, heads=heads, num_tokens=4096, page_size=page_size, **more)


def _llama8(name: str, **more: Any) -> Geometry:
    return Geometry(
        name=f"Llama-3-8B P1->D1, 4096 tokens, pages of 16{name}",
        num_layers=32,
        held=(8, 8),
        heads=8,
        num_tokens=4096,
        page_size=16,
        **more,
    )


_LATENT = Geometry(
    name="DeepSeek-V3 latents, 4096 tokens, pages of 64",
    num_layers=61,
    held=(1, 1),
    heads=1,
    num_tokens=4096,
    page_size=64,
    head_dim=576,
    is_latent=True,
)

ON_GPU = (
    *(_llama70("P4->D2", (2, 4), 2, page_size, has_peer=True) for page_size in (16, 64)),
    *(_llama70("P2->D4", (4, 2), 2, page_size, has_peer=True) for page_size in (16, 64)),
    *(_llama70("P4->D8", (2, 1), 1, page_size, has_peer=True) for page_size in (16, 64)),
    _llama70("HND P4->D2", (2, 4), 2, 16, order=TokenOrder.HND),
    *(
        Geometry(
            name=f"Qwen3-8B P4->D1, {num_tokens} tokens, pages of {page_size}",
            num_layers=36,
            held=(2, 8),
            heads=2,
            num_tokens=num_tokens,
            page_size=page_size,
            has_peer=True,
        )
        for num_tokens, page_size in ((8192, 1), (512, 16))
    ),
    _llama8("", has_peer=True),
    _LATENT,
    _llama8(", wire float8", wire_dtype=DType.FLOAT8_E4M3),
    _llama8(", wire float8 scaled", wire_dtype=DType.FLOAT8_E4M3, scale=0.37),
    _llama8(", wire float16", wire_dtype=DType.FLOAT16),
)
"""Cases with a target on GPUs, and conversions."""


def _host(name: str, **more: Any) -> Geometry:
    held = {"held": (8, 8), "heads": 8, **more}
    num_tokens = 2048 * 8 // held["heads"]
    return Geometry(name=f"8 layers of 8 heads, {name}", num_layers=8, num_tokens=num_tokens, **held)


ON_HOST = (
    _host("pages of 16", page_size=16),
    _host("pages of 16 in order", page_size=16, is_consecutive=True),
    _host("pages of 256", page_size=256),
    _host("pages of 1", page_size=1),
    _host("pages of 16, 4 heads travel", page_size=16, heads=4),
    _host("pages of 16 in order, 4 heads travel", page_size=16, heads=4, is_consecutive=True),
    _host("HND pages of 16", page_size=16, order=TokenOrder.HND),
    _host("HND pages of 16 in order", page_size=16, order=TokenOrder.HND, is_consecutive=True),
    _host("HND pages of 16, 4 heads travel", page_size=16, heads=4, order=TokenOrder.HND),
    _host("pages of 16, wire float8", page_size=16, wire_dtype=DType.FLOAT8_E4M3),
)
"""64 MiB of payload each (half of that where it is narrowed)."""
