"""The one operator that SGLang 0.5.23 takes from vLLM on a CPU: its rotary embedding."""

from __future__ import annotations

import torch
from torch import Tensor


def rotary_embedding(positions: Tensor, query: Tensor, key: Tensor, head_size: int, cos_sin_cache: Tensor, is_neox: bool) -> None:
    """Rotate the first elements of each head in place.

    Args:
        positions: [tokens].
        query, key: [tokens, heads * head_size].
        cos_sin_cache: [positions, rotary]; the cosines first.
        is_neox: Pairs are the two halves; otherwise neighbours.
    """
    table = cos_sin_cache[positions.flatten()].float()
    cos, sin = (half[:, None, :] for half in table.chunk(2, dim=-1))
    num_rotary = table.shape[-1]
    for states in (query, key):
        heads = states.view(positions.numel(), -1, head_size)[..., :num_rotary]
        values = heads.float()
        if is_neox:
            first, second = values.chunk(2, dim=-1)
            turned = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
        else:
            first, second = values[..., 0::2], values[..., 1::2]
            turned = torch.stack([first * cos - second * sin, second * cos + first * sin], dim=-1).flatten(-2)
        heads.copy_(turned)
