"""From logits to a token.

A sampled token depends only on logits, sampling values and position. There is no generator state between steps, so the side, the
batch and restarts do not matter.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor

from transfer.engine_types import SamplingParams
from transfer.errors import EngineError

SAMPLED_ELEMENTS = 1 << 22
"""Logits that are sampled at a time, about 32 rows of a large vocabulary: eight arrays of 8 bytes each, about 256 MiB."""

MIN_TEMPERATURE = 1e-200
"""Lower bound of the temperature. It selects the likeliest of any float32 logits; a lower one could make them infinite."""


def sample_on_device(logits: Tensor, params: Sequence[SamplingParams], positions: Sequence[int]) -> Tensor:
    """Choose one token per row, on the logits' device.

    Queued on the current stream, without a synchronisation. Greedy rows cost only an argmax.

    Args:
        logits: [rows, vocab], floating point and finite.
        positions: Position of each row's token in its request.

    Returns:
        One token id per row, int64 [rows] on the logits' device.

    Raises:
        EngineError: The numbers of rows, params and positions differ.
    """
    if not len(params) == len(positions) == len(logits):
        raise EngineError(f"logits has {len(logits)} rows, params {len(params)}, positions {len(positions)}; must be as many")
    tokens = logits.argmax(dim=-1)
    sampled = [row for row, values in enumerate(params) if not values.is_greedy]
    block_rows = max(1, SAMPLED_ELEMENTS // max(1, logits.shape[-1]))
    for begin in range(0, len(sampled), block_rows):
        rows = sampled[begin : begin + block_rows]
        at, chosen = _sample_rows(logits, rows, [params[row] for row in rows], [positions[row] for row in rows])
        tokens.index_copy_(0, at, chosen)
    return tokens


def _sample_rows(
    logits: Tensor, rows: Sequence[int], params: Sequence[SamplingParams], positions: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """Invert the cumulative distribution of each row's kept tokens at a uniform number; return row numbers and tokens.

    The tokens are in the order of their ids. In the order of probability, two nearly equal tokens would change places with the
    last bit of a logit, which differs between batches, and so would every token between them.
    """
    vocab = logits.shape[-1]
    # In float64 the sums of two devices differ by far less than their logits do.
    values = torch.tensor(
        [
            rows,
            [max(one.temperature, MIN_TEMPERATURE) for one in params],
            [one.top_k if 0 < one.top_k < vocab else 0 for one in params],
            [one.top_p if one.top_p < 1 else 2.0 for one in params],
            [uniform(one.seed, position) for one, position in zip(params, positions, strict=True)],
        ],
        dtype=torch.float64,
        pin_memory=logits.device.type == "cuda",
    ).to(logits.device, non_blocking=True)
    at = values[0].long()
    temperature, top_k, top_p, threshold = values[1:, :, None]
    scaled = logits.index_select(0, at).double() / temperature
    most_kept = max((one.top_k for one in params if one.top_k < vocab), default=0)
    if most_kept:
        # Ties with the k-th token are kept: dropping one would depend on an arbitrary order.
        smallest_kept = scaled.topk(most_kept).values.gather(1, (top_k.long() - 1).clamp_(min=0))
        scaled = scaled.masked_fill(scaled < smallest_kept.masked_fill_(top_k == 0, float("-inf")), float("-inf"))
    probabilities = torch.softmax(scaled, dim=-1)
    if any(one.top_p < 1 for one in params):
        descending, order = torch.sort(probabilities, dim=-1, descending=True, stable=True)
        reached_before = torch.cumsum(descending, dim=-1) - descending
        kept = descending.masked_fill_(reached_before >= top_p, 0.0)
        probabilities = torch.empty_like(kept).scatter_(1, order, kept)
    cumulative = torch.cumsum(probabilities, dim=-1)
    # right=True: the first token whose cumulative probability is above the threshold; its probability is never 0.
    chosen = torch.searchsorted(cumulative, threshold * cumulative[:, -1:], right=True)
    last_kept = vocab - 1 - (probabilities > 0).to(torch.uint8).flip(-1).argmax(dim=-1)
    return at, torch.minimum(chosen[:, 0], last_kept)


def uniform(seed: int, position: int) -> float:
    """Return a number in [0, 1), uniform over seeds and positions: 53 bits of BLAKE2b(seed, position)."""
    digest = hashlib.blake2b(seed.to_bytes(8, "little") + position.to_bytes(8, "little"), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 11) * 2.0**-53
