"""The transfer that most is measured on: Llama 3 70B, from prefill TP 4 to decode TP 2, rank 0 to rank 0."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from transfer.copy import head_slice_copier
from transfer.copy.copier import CopyPlan
from transfer.layout import DType, KVLayout, Range, Route, Shard, routes, wire_buffers
from transfer.pool.kv_pool import PagedKVPool, as_words

LAYOUT = KVLayout.uniform(num_layers=80, num_kv_heads=8, head_dim=128, dtype=DType.BFLOAT16)
PREFILL, DECODE = Shard(tp_size=4, page_size=16), Shard(tp_size=2, page_size=16)
TOKEN_BYTES = 2 * LAYOUT.num_layers * 2 * 128 * 2  # on this route: K and V of two heads in every layer


@dataclass(frozen=True, slots=True, kw_only=True)
class Gather:
    """A gather of the route's heads of some tokens, whose pages lie in random order in a pool twice as large.

    Attributes:
        pages: int64 [n], on the pool's device.
    """

    pool: PagedKVPool
    plan: CopyPlan
    pages: Tensor

    @classmethod
    def of(cls, num_tokens: int, device: str, *, layers: Range | None = None) -> Gather:
        """A filled pool and a prepared plan.

        Args:
            num_tokens: A multiple of the page size.
            layers: Those that move; all by default.
        """
        layers = Range(begin=0, end=LAYOUT.num_layers) if layers is None else layers
        num_pages = num_tokens // PREFILL.page_size
        pool = PagedKVPool(layout=LAYOUT, shard=PREFILL, num_pages=2 * num_pages, device=device)
        fill(pool, seed=1)
        order = torch.randperm(2 * num_pages, generator=torch.Generator().manual_seed(2))[:num_pages].to(device)
        tokens = Range(begin=0, end=num_tokens)
        buffers = wire_buffers(LAYOUT, route(), tokens=tokens, layers=layers, num_tokens=num_tokens, dtype=LAYOUT.dtype)
        heads = route().heads
        span = Range(begin=heads.source_start, end=heads.source_start + heads.count)
        plan = head_slice_copier(pool, heads=span, wire_dtype=LAYOUT.dtype).plan(buffers)
        return cls(pool=pool, plan=plan, pages=order)


def fill(pool: PagedKVPool, *, seed: int) -> None:
    """Random bits everywhere."""
    generator = torch.Generator(device=pool.device).manual_seed(seed)
    for layer in range(pool.layout.num_layers):
        for is_v in (False, True):
            as_words(pool.buffer(layer, is_v=is_v)).random_(-(2**15), 2**15, generator=generator)


def route() -> Route:
    """Of prefill rank 0; it has one."""
    return next(one for one in routes(LAYOUT, PREFILL, DECODE) if not one.prefill_rank)
