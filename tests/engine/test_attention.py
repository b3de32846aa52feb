"""One attention call, against the formula, and without ever repeating the K and V that query heads share."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from embedded_engine.paged_attention import Scores, attention


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


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.parametrize(("num_kv_heads", "rows", "is_masked"), [(1, 1, True), (2, 1, False), (2, 5, True), (6, 5, True)])
def test_agrees_with_the_formula(num_kv_heads: int, rows: int, is_masked: bool, has_sinks: bool, softcap: float | None) -> None:
    generator = torch.Generator().manual_seed(1)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    query, key, value = random(3, 6, rows, 8), random(3, num_kv_heads, 11, 8), random(3, num_kv_heads, 11, 8)
    mask = random(3, 1, rows, 11).masked_fill(random(3, 1, rows, 11) > 1, -torch.inf) if is_masked else None
    if mask is not None and rows > 1:
        mask = mask[0, 0]
    scores = Scores(scale=0.6, softcap=softcap, sinks=random(6) if has_sinks else None)
    found = attention(query, key, value, mask, scores)
    torch.testing.assert_close(found, by_the_formula(query, key, value, mask, scores), atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("scores", [Scores(scale=0.1), Scores(scale=0.1, softcap=3.0), Scores(scale=0.1, sinks=torch.zeros(32))])
@pytest.mark.parametrize("rows", [1, 4])
def test_what_heads_share_is_never_repeated(rows: int, scores: Scores) -> None:
    """32 query heads on one KV head: expanded, K alone would be 32 times as large as it is."""
    query, key = torch.randn(1, 32, rows, 64), torch.randn(1, 1, 4000, 64)
    mask = torch.zeros(rows, 4000)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler, torch.inference_mode():
        attention(query, key, key, mask, scores)
    allocated = max(event.cpu_memory_usage for event in profiler.events())
    weights = 32 * rows * 4000 * 4
    assert allocated <= max(3 * weights, key.numel() * 4), f"{allocated} bytes; expanded K has {32 * key.numel() * 4}"
    assert 3 * weights < 32 * key.numel() * 4 / 4
