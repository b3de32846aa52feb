"""From logits to a token.

A sampled token is a function of (logits, sampling values, position) and of nothing else: no generator state is carried from
step to step, so it does not matter on which side, in which batch or after which restart a token is sampled.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor

from transfer.engine_types import SamplingParams


def sample(logits: Tensor, params: Sequence[SamplingParams], positions: Sequence[int]) -> list[int]:
    """Choose one token per row.

    Args:
        logits: [rows, vocab], floating point, on any device; must be finite.
        params: How each row is sampled.
        positions: Position in its request that each row's token will have.

    Returns:
        One token id per row.
    """
    tokens: list[int] = logits.argmax(dim=-1).tolist()
    for row, (values, position) in enumerate(zip(params, positions, strict=True)):
        if not values.is_greedy:
            tokens[row] = _sample_row(logits[row], values, position)
    return tokens


def _sample_row(logits: Tensor, params: SamplingParams, position: int) -> int:
    """Invert the cumulative distribution of the kept tokens at one uniform number.

    The tokens stay in the order of their ids. In the order of their probability, two nearly equal ones would swap places with
    the last bit of a logit, which differs between batches, and every token between them would change with them.
    """
    # Computed on the CPU in float64: the same bits on both sides, whatever devices they run on.
    scaled = logits.to(device="cpu", dtype=torch.float64) / params.temperature
    if 0 < params.top_k < scaled.numel():
        # Ties with the k-th are kept: dropping one of them would depend on an order that means nothing.
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
    # right=True: the first token whose cumulative probability is above the threshold, which never is one of probability 0.
    return int(torch.searchsorted(cumulative, threshold, right=True).clamp_(max=int(probabilities.nonzero()[-1])))


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1), uniform over seeds and positions, the same on every machine: 53 bits of BLAKE2b(seed, position)."""
    digest = hashlib.blake2b(seed.to_bytes(8, "little") + position.to_bytes(8, "little"), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 11) * 2.0**-53
