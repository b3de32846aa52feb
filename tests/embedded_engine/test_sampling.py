"""Sampling: greedy, seeded, filtered, and the same wherever it happens."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from embedded_engine import sampling
from embedded_engine.engine import EmbeddedEngine
from embedded_engine.sampling import sample_on_device, uniform
from tests.embedded_engine.steps import generate_all
from transfer.engine_types import SamplingParams
from transfer.errors import ConfigError
from transfer.layout import Shard


def sample(logits: Tensor, params: Sequence[SamplingParams], positions: Sequence[int]) -> list[int]:
    tokens: list[int] = sample_on_device(logits, params, positions).tolist()
    return tokens


def draws(logits: list[float], count: int, **values: float) -> Counter[int]:
    row = torch.tensor([logits])
    params = SamplingParams(**values)  # type: ignore[arg-type]
    return Counter(sample(row, [params], [position])[0] for position in range(count))


def test_frequencies_are_the_softmax_at_the_temperature() -> None:
    logits, count = [0.0, 1.0, 2.0, -1.0], 4000
    for temperature in (0.7, 1.0, 2.0):
        found = draws(logits, count, temperature=temperature, seed=9)
        weights = [math.exp(value / temperature) for value in logits]
        for token, weight in enumerate(weights):
            share = weight / sum(weights)
            assert abs(found[token] / count - share) < 4 * math.sqrt(share * (1 - share) / count)


def test_seed_and_position_each_matter_and_nothing_else_does() -> None:
    assert uniform(1, 2) == uniform(1, 2)
    # 10,000 different numbers: neither value is ignored, and they do not simply add up.
    numbers = [uniform(seed, position) for seed in range(100) for position in range(100)]
    assert len(set(numbers)) == len(numbers)
    assert all(0 <= number < 1 for number in numbers)
    assert abs(sum(numbers) / len(numbers) - 0.5) < 0.02
    assert uniform(7, 11) == 0.24473452303993637, "the numbers must never change: both sides of an upgrade draw the same"


def test_a_last_bit_of_noise_does_not_change_tokens() -> None:
    """Logits differ in the last bits between batches; near ties are common, so their order must not decide."""
    generator = torch.Generator().manual_seed(0)
    logits = (torch.randn(1, 500, generator=generator) * 0.01).repeat(400, 1)
    noisy = logits + torch.randn(logits.shape, generator=generator) * 1e-6
    params = [SamplingParams(temperature=1.0, seed=seed) for seed in range(400)]
    assert sample(logits, params, [0] * 400) == sample(noisy, params, [0] * 400)


def sample_row(logits: Tensor, params: SamplingParams, position: int) -> int:
    """One row at a time, as plainly as it can be said: what the batched computation must agree with."""
    if params.is_greedy:
        return int(logits.argmax())
    scaled = logits.to(torch.float64) / params.temperature
    if 0 < params.top_k < scaled.numel():
        smallest_kept = torch.topk(scaled, params.top_k).values[-1]
        scaled = scaled.masked_fill(scaled < smallest_kept, float("-inf"))
    probabilities = torch.softmax(scaled, dim=-1)
    if params.top_p < 1:
        descending, order = torch.sort(probabilities, descending=True, stable=True)
        reached_before = torch.cumsum(descending, dim=-1) - descending
        dropped = order[reached_before >= params.top_p]
        probabilities[dropped] = 0
    cumulative = torch.cumsum(probabilities, dim=-1)
    threshold = uniform(params.seed, position) * cumulative[-1]
    return int(torch.searchsorted(cumulative, threshold, right=True).clamp_(max=int(probabilities.nonzero()[-1])))


sampling_params = st.builds(
    SamplingParams,
    temperature=st.sampled_from((0.0, 0.01, 0.5, 1.0, 3.0, 100.0)),
    top_p=st.sampled_from((1.0, 1e-6, 0.3, 0.9, 0.999999)),
    top_k=st.sampled_from((0, 1, 3, 20, 10_000)),
    seed=st.integers(0, 2**63 - 1),
)


@settings(max_examples=50)
@given(
    params=st.lists(sampling_params, max_size=9),
    vocab=st.sampled_from((1, 2, 17, 300, 3000)),
    dtype=st.sampled_from((torch.float32, torch.bfloat16, torch.float16, torch.float64)),
    decimals=st.sampled_from((0, 1, 6)),
    seed=st.integers(0, 1000),
    block_elements=st.sampled_from((1, 600, 1 << 22)),
)
def test_a_batch_gives_what_its_rows_give(
    params: list[SamplingParams], vocab: int, dtype: torch.dtype, decimals: int, seed: int, block_elements: int
) -> None:
    """Bit for bit the row-by-row computation, with ties (rounded logits), in any batch and cut into any blocks."""
    generator = torch.Generator().manual_seed(seed)
    logits = (torch.randn(len(params), vocab, generator=generator) * 3).round(decimals=decimals).to(dtype)
    before = logits.clone()
    positions = list(range(seed, seed + len(params)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sampling, "SAMPLED_ELEMENTS", block_elements)
        tokens = sample_on_device(logits, params, positions)
    assert tokens.dtype is torch.int64 and tuple(tokens.shape) == (len(params),)
    assert tokens.tolist() == [sample_row(*row) for row in zip(logits, params, positions, strict=True)]
    assert torch.equal(logits, before)


def test_the_last_number_never_runs_over_the_kept_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """The largest uniform number times a sum can round up to the sum itself."""
    monkeypatch.setattr(sampling, "uniform", lambda seed, position: 1.0)
    logits = torch.tensor([[1.0, 5.0, 2.0, 4.0, -1.0]])
    assert sample(logits, [SamplingParams(temperature=1.0, top_k=2)], [0]) == [3]
    assert sample(logits, [SamplingParams(temperature=1.0, top_p=0.5)], [0]) == [1]
    # A row that keeps every token keeps those too that a sum of 1 is reached before, whatever its neighbours drop.
    steep = torch.tensor([[50.0, 0.0], [50.0, 0.0]])
    assert sample(steep, [SamplingParams(temperature=1.0, top_p=top_p) for top_p in (1.0, 0.5)], [0, 0]) == [1, 0]


@pytest.mark.parametrize("temperature", [1e-3, 1e-200, 1e-300, 1e-310, 5e-324])
@pytest.mark.parametrize("filters", [{}, {"top_k": 3}, {"top_p": 0.5}])
def test_a_temperature_near_zero_takes_the_likeliest(temperature: float, filters: dict[str, Any]) -> None:
    """Divided by it, logits would be infinite: of both signs, and several of them alike."""
    generator = torch.Generator().manual_seed(4)
    logits = torch.cat([torch.randn(3, 50, generator=generator) * 5, torch.full((1, 50), 3e38)])
    logits[:, 49] = -3e38
    logits[3, 7:9] = torch.tensor([3e38, 3e38]).nextafter(torch.tensor(torch.inf))
    tokens = sample(logits, [SamplingParams(temperature=temperature, seed=1, **filters)] * 4, [3, 4, 5, 6])
    assert tokens[:3] == logits[:3].argmax(dim=-1).tolist() and tokens[3] in (7, 8)


def test_sampled_generation_is_reproducible_and_independent_of_its_batch(
    demo_dir: Path, prompts: dict[int, tuple[int, ...]]
) -> None:
    sampling = SamplingParams(temperature=0.8, top_p=0.9, top_k=40, seed=123)
    engines = [EmbeddedEngine(demo_dir, shard=Shard(page_size=size), num_pages=1600 // size) for size in (16, 32)]
    alone = [generate_all(engine, {"a": prompts[33]}, 12, sampling=sampling)["a"] for engine in engines]
    batch = {"b": prompts[129], "a": prompts[33], "c": prompts[5]}
    crowded = generate_all(engines[0], batch, 12, chunk_tokens=30, sampling=sampling)
    assert alone[0] == alone[1] == crowded["a"]
    other = SamplingParams(temperature=0.8, top_p=0.9, top_k=40, seed=124)
    assert generate_all(engines[0], {"a": prompts[33]}, 12, sampling=other)["a"] != alone[0]


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"temperature": -0.1}, "temperature is -0.1"),
        ({"top_p": 0.0}, "top_p is 0.0"),
        ({"top_k": -1}, "top_k is -1"),
        ({"seed": 2**63}, "seed is 9223372036854775808"),
    ],
)
def test_values_out_of_range(values: dict[str, float], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        SamplingParams(**values)  # type: ignore[arg-type]
