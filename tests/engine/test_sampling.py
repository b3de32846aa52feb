"""Sampling: greedy, seeded, filtered, and the same wherever it happens."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path

import pytest
import torch

from embedded_engine.engine import EmbeddedEngine
from embedded_engine.sampling import sample, uniform
from tests.engine.steps import generate_all
from transfer.engine_types import GREEDY, SamplingParams
from transfer.errors import ConfigError
from transfer.layout import Shard


def draws(logits: list[float], count: int, **values: float) -> Counter[int]:
    row = torch.tensor([logits])
    params = SamplingParams(**values)  # type: ignore[arg-type]
    return Counter(sample(row, [params], [position])[0] for position in range(count))


def test_greedy_takes_the_largest() -> None:
    assert sample(torch.tensor([[0.0, 2.0, 1.0], [5.0, 2.0, 1.0]]), [GREEDY, GREEDY], [4, 4]) == [1, 0]


def test_frequencies_are_the_softmax_at_the_temperature() -> None:
    logits, count = [0.0, 1.0, 2.0, -1.0], 4000
    for temperature in (0.7, 1.0, 2.0):
        found = draws(logits, count, temperature=temperature, seed=9)
        weights = [math.exp(value / temperature) for value in logits]
        for token, weight in enumerate(weights):
            share = weight / sum(weights)
            assert abs(found[token] / count - share) < 4 * math.sqrt(share * (1 - share) / count)


def test_top_k_and_top_p_drop_what_they_should_and_nothing_else() -> None:
    logits = [math.log(share) for share in (0.1, 0.4, 0.2, 0.3)]
    assert set(draws(logits, 600, temperature=1.0)) == {0, 1, 2, 3}
    assert set(draws(logits, 600, temperature=1.0, top_k=1)) == {1}
    assert set(draws(logits, 600, temperature=1.0, top_k=2)) == {1, 3}
    assert set(draws(logits, 600, temperature=1.0, top_k=9)) == {0, 1, 2, 3}
    assert set(draws(logits, 600, temperature=1.0, top_p=0.35)) == {1}
    assert set(draws(logits, 600, temperature=1.0, top_p=0.65)) == {1, 3}
    assert set(draws(logits, 600, temperature=1.0, top_p=0.75)) == {1, 2, 3}
    assert set(draws(logits, 600, temperature=1.0, top_k=2, top_p=0.5)) == {1}
    assert set(draws([3.0, 3.0, 3.0], 600, temperature=1.0, top_k=1)) == {0, 1, 2}, "ties with the k-th are kept"


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


def test_edges() -> None:
    only = torch.tensor([[-1e9, 0.0, -1e9]])
    assert {sample(only, [SamplingParams(temperature=0.01, seed=seed)], [0])[0] for seed in range(50)} == {1}
    spread = torch.zeros(1, 1000)
    assert max(sample(spread, [SamplingParams(temperature=100.0, seed=seed)], [0])[0] for seed in range(500)) > 950
    assert sample(torch.empty(0, 10), [], []) == []


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
        ({"temperature": math.nan}, "temperature is nan"),
        ({"temperature": math.inf}, "temperature is inf"),
        ({"top_p": 0.0}, "top_p is 0.0"),
        ({"top_p": 1.01}, "top_p is 1.01"),
        ({"top_p": math.nan}, "top_p is nan"),
        ({"top_k": -1}, "top_k is -1"),
        ({"seed": -1}, "seed is -1"),
        ({"seed": 2**63}, "seed is 9223372036854775808"),
    ],
)
def test_values_out_of_range(values: dict[str, float], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        SamplingParams(**values)  # type: ignore[arg-type]
