"""One attention call, against the formula, and without ever repeating the K and V that query heads share."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from embedded_engine import attention as attention_module
from embedded_engine import paged_attention
from embedded_engine.attention import Scores, attention
from embedded_engine.paged_attention import PrefillPlan, rows_of_similar_length
from transfer.engine_types import PrefillItem
from transfer.layout import DType, KVLayout, LayerKind, LayerSpec, Shard
from transfer.pool.kv_pool import KVPool


def by_the_formula(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scores: Scores) -> Tensor:
    """Head by head, in float64."""
    output = torch.empty((*query.shape[:3], value.shape[-1]))
    shared = query.shape[1] // key.shape[1]
    for batch, head in itertools.product(range(query.shape[0]), range(query.shape[1])):
        q, k, v = query[batch, head].double(), key[batch, head // shared].double(), value[batch, head // shared].double()
        weights = q @ k.T * scores.scale
        if scores.softcap is not None:
            weights = scores.softcap * torch.tanh(weights / scores.softcap)
        if mask is not None:
            weights = weights + (mask if mask.ndim == 2 else mask[batch, 0])
        exponents = torch.exp(weights)
        total = exponents.sum(dim=-1, keepdim=True)
        if scores.sinks is not None:
            total = total + math.exp(scores.sinks[head])
        output[batch, head] = (exponents / total @ v).float()
    return output


@pytest.mark.parametrize("takes_shared_heads", [None, False], ids=["as on this device", "as on a GPU"])
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.parametrize(("num_kv_heads", "rows", "is_masked"), [(1, 1, True), (2, 1, False), (2, 5, True), (6, 5, True)])
def test_agrees_with_the_formula(
    num_kv_heads: int, rows: int, is_masked: bool, has_sinks: bool, softcap: float | None, takes_shared_heads: bool | None
) -> None:
    generator = torch.Generator().manual_seed(1)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    query, key, value = random(3, 6, rows, 8), random(3, num_kv_heads, 11, 8), random(3, num_kv_heads, 11, 8)
    mask = random(3, 1, rows, 11).masked_fill(random(3, 1, rows, 11) > 1, -torch.inf) if is_masked else None
    if mask is not None and rows > 1:
        mask = mask[0, 0]
    scores = Scores(scale=0.6, softcap=softcap, sinks=random(6) if has_sinks else None)
    found = attention(query, key, value, mask, scores, takes_shared_heads=takes_shared_heads)
    torch.testing.assert_close(found, by_the_formula(query, key, value, mask, scores), atol=2e-5, rtol=1e-4)


def peak_bytes(compute: Callable[[], Tensor]) -> int:
    """The most that was allocated at once beyond what was there before."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler, torch.inference_mode():
        compute()
    now = peak = 0
    assert profiler.profiler is not None
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        peak = max(peak, now)
    return peak


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scores", [Scores(scale=0.1, softcap=3.0), Scores(scale=0.1, sinks=torch.linspace(-2, 2, 16))])
@pytest.mark.parametrize(("batch", "rows"), [(1, 128), (24, 1)])
def test_memory_does_not_grow_with_the_context(
    monkeypatch: pytest.MonkeyPatch, batch: int, rows: int, scores: Scores, dtype: torch.dtype
) -> None:
    """16 heads x 128 rows x 4,000 keys: their scores alone, in float32, are eight times as much as there may be."""
    bound = 4 << 20
    query = torch.randn(batch, 16, rows, 32, dtype=dtype)
    key, value = torch.randn(2, batch, 2, 4000, 32, dtype=dtype)
    mask = torch.full((rows, 4000), -torch.inf, dtype=dtype).triu(4000 - rows + 1)
    if rows == 1:
        mask = torch.zeros(batch, 1, 1, 4000, dtype=dtype)
        mask[1, ..., 5:], mask[2, ..., :3000] = -torch.inf, -torch.inf
    whole = attention(query, key, value, mask, scores)
    monkeypatch.setattr(attention_module, "ATTENTION_BYTES", bound)
    result_bytes = query.numel() * 4
    assert peak_bytes(lambda: attention(query, key, value, mask, scores)) < bound + 6 * result_bytes
    close = {"atol": 2e-5, "rtol": 1e-4} if dtype is torch.float32 else {"atol": 1e-2, "rtol": 1e-2}
    found = attention(query, key, value, mask, scores)
    torch.testing.assert_close(found, whole, **close)
    expected = by_the_formula(query.float(), key.float(), value.float(), mask.float(), scores)
    torch.testing.assert_close(found.float(), expected, **close)


class Heads:
    """In the place of an MLA layer's own.

    Attributes:
        num_tokens: Tokens of each call of `expand`.
    """

    value_dim = 8
    compressed_dim = 12

    def __init__(self, num_heads: int) -> None:
        generator = torch.Generator().manual_seed(3)
        self.weight = torch.randn(num_heads, 20, 12, generator=generator) / 4
        self.num_tokens: list[int] = []

    def expand(self, latents: Tensor) -> tuple[Tensor, Tensor]:
        self.num_tokens.append(len(latents))
        joined = torch.einsum("tc,hdc->htd", latents[:, 0, :12], self.weight).unsqueeze(0)
        rotary = latents[:, 0, 12:].expand(1, len(self.weight), -1, -1)
        return torch.cat((joined[..., :12], rotary), dim=-1), joined[..., 12:]

    def absorb(self, query: Tensor) -> Tensor:
        raise NotImplementedError

    def values(self, attended: Tensor) -> Tensor:
        raise NotImplementedError


def attend_latents(num_heads: int, lengths: list[int], first_token: int) -> tuple[Tensor, list[int]]:
    """A chunk of each request, of which those of more than `first_token` tokens have that many in the pool."""
    spec = LayerSpec(kind=LayerKind.MLA, num_kv_heads=1, k_head_dim=16, v_head_dim=0)
    layout = KVLayout(layers=(spec,), dtype=DType.FLOAT32)
    num_pages = -(-max(lengths) // 16)
    pool = KVPool(layout=layout, shard=Shard(page_size=16), num_pages=num_pages * len(lengths), device="cpu")
    generator = torch.Generator().manual_seed(6)
    latents = pool.buffer(0, is_v=False)
    latents.copy_(torch.randn(latents.shape, generator=generator))
    items = [
        PrefillItem(
            request_id=str(index),
            token_ids=(1,) * (length - (first := first_token if length > first_token else 0)),
            first_token=first,
            page_tables=(tuple(range(index * num_pages, (index + 1) * num_pages)),),
            is_last=True,
        )
        for index, length in enumerate(lengths)
    ]
    tables = [tuple(np.array(table) for table in item.page_tables) for item in items]
    plan = PrefillPlan(items, tables, pool, torch.float32, lambda layer: None)
    num_rows = sum(item.num_tokens for item in items)
    query = torch.randn(1, num_heads, num_rows, 16, generator=generator)
    new = torch.randn(num_rows, 1, 16, generator=generator)
    heads = Heads(num_heads)
    return plan.attend_latent(0, query, new, heads, Scores(scale=0.3)), heads.num_tokens


@pytest.mark.parametrize(
    ("first_token", "whole", "parts"),
    [
        (0, [1200, 40], [500, 500, 200, 40]),
        (900, [300, 900, 40], [300, 500, 400, 40]),
        (1100, [100, 1100, 40], [100, 500, 500, 100, 40]),
    ],
)
def test_latents_are_expanded_part_by_part(
    monkeypatch: pytest.MonkeyPatch, first_token: int, whole: list[int], parts: list[int]
) -> None:
    """Every head of every token of a long context, expanded at once, is many times as large as its latents."""
    lengths = [1200, 40]
    expected, num_tokens = attend_latents(4, lengths, first_token)
    assert num_tokens == whole
    token_bytes = 4 * 2 * (16 + 8) * 4
    for module in (attention_module, paged_attention):
        monkeypatch.setattr(module, "ATTENTION_BYTES", 500 * token_bytes)
    found, num_tokens = attend_latents(4, lengths, first_token)
    assert num_tokens == parts
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=1e-4)


@given(st.lists(st.integers(min_value=1, max_value=5000), min_size=1, max_size=20))
def test_groups_hold_each_row_once_in_order_and_of_similar_length(lengths: list[int]) -> None:
    groups = rows_of_similar_length(lengths)
    assert sorted(row for group in groups for row in group) == list(range(len(lengths)))
    for group in groups:
        assert group == sorted(group)
        own = [lengths[row] for row in group]
        assert max(own) <= 2 * min(own)
