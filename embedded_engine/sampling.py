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
from transfer.errors import EngineError

SAMPLED_ELEMENTS = 1 << 22
"""Logits that are sampled at a time, about 32 rows of a large vocabulary: eight arrays of 8 bytes each, so about 256 MiB, however
large the batch."""

MIN_TEMPERATURE = 1e-200
"""A lower temperature counts as this one, which already takes the likeliest of any float32 logits; divided by less, they could
become infinite."""


def sample_on_device(logits: Tensor, params: Sequence[SamplingParams], positions: Sequence[int]) -> Tensor:
    """Choose one token per row, where the logits are.

    Queued on the current stream of the logits' device, without a synchronisation. Greedy rows cost an argmax and no more.

    Args:
        logits: [rows, vocab], floating point, on any device; must be finite.
        params: How each row is sampled.
        positions: Position in its request that each row's token will have.

    Returns:
        One token id per row, int64 [rows] on the logits' device.

    Raises:
        EngineError: There is not one set of values and one position for each row.
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
    """Invert the cumulative distribution of each row's kept tokens at one uniform number; the rows' numbers and tokens.

    The tokens stay in the order of their ids. In the order of their probability, two nearly equal ones would swap places with
    the last bit of a logit, which differs between batches, and every token between them would change with them.
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
        # Ties with the k-th are kept: dropping one of them would depend on an order that means nothing.
        smallest_kept = scaled.topk(most_kept).values.gather(1, (top_k.long() - 1).clamp_(min=0))
        scaled = scaled.masked_fill(scaled < smallest_kept.masked_fill_(top_k == 0, float("-inf")), float("-inf"))
    probabilities = torch.softmax(scaled, dim=-1)
    if any(one.top_p < 1 for one in params):
        descending, order = torch.sort(probabilities, dim=-1, descending=True, stable=True)
        reached_before = torch.cumsum(descending, dim=-1) - descending
        kept = descending.masked_fill_(reached_before >= top_p, 0.0)
        probabilities = torch.empty_like(kept).scatter_(1, order, kept)
    cumulative = torch.cumsum(probabilities, dim=-1)
    # right=True: the first token whose cumulative probability is above the threshold, which never is one of probability 0.
    chosen = torch.searchsorted(cumulative, threshold * cumulative[:, -1:], right=True)
    last_kept = vocab - 1 - (probabilities > 0).to(torch.uint8).flip(-1).argmax(dim=-1)
    return at, torch.minimum(chosen[:, 0], last_kept)


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1), uniform over seeds and positions, the same on every machine: 53 bits of BLAKE2b(seed, position)."""
    digest = hashlib.blake2b(seed.to_bytes(8, "little") + position.to_bytes(8, "little"), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 11) * 2.0**-53
