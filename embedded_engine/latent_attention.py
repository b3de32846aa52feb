"""Multi-head latent attention (MLA): the pool keeps one latent per token, from which each head computes its K and V.

Source: DeepSeek-V2 (arXiv 2405.04434), section 2.1. A latent is the compressed KV and, beside it, the rotary key that all heads
share. Query heads are sharded over the ranks of a TP group; the latent is the same on every rank.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel


class LatentHeads:
    """The heads of one MLA layer of this rank. Views of the layer's weights; nothing is copied.

    Args:
        module: transformers' attention layer.

    Attributes:
        value_dim: Elements of a head's value.
        compressed_dim: Elements at the beginning of a latent that values are made of; the rest is the rotary key.
    """

    def __init__(self, module: Any) -> None:
        self._module = module
        self.value_dim: int = module.v_head_dim
        self.compressed_dim: int = module.kv_lora_rank
        joined = module.kv_b_proj.weight.view(-1, module.qk_nope_head_dim + module.v_head_dim, module.kv_lora_rank)
        self._key_weight, self._value_weight = joined.split([module.qk_nope_head_dim, module.v_head_dim], dim=1)

    def expand(self, latents: Tensor) -> tuple[Tensor, Tensor]:
        """Return K and V [1, query heads, tokens, dim] of every head, from latents [tokens, 1, latent dim]."""
        module = self._module
        compressed, rotary = latents.transpose(0, 1).unsqueeze(0).split([module.kv_lora_rank, module.qk_rope_head_dim], dim=-1)
        k, v = type(module).expand_kv(module, compressed, rotary)
        return k, v

    def absorb(self, query: Tensor) -> Tensor:
        """Return queries [1, query heads, rows, latent dim] whose products with latents equal those with the heads' keys.

        (W_K c) . q is c . (W_K^T q): the head's key projection moves to the query.
        """
        plain, rotary = query.split([self._module.qk_nope_head_dim, self._module.qk_rope_head_dim], dim=-1)
        return torch.cat((plain @ self._key_weight, rotary), dim=-1)

    def values(self, attended: Tensor) -> Tensor:
        """Return [1, rows, query heads, value dim], from weighted sums of latents [1, rows, query heads, latent dim or less].

        The weighted sum of W_V c is W_V times the weighted sum of c. Only the compressed part of the latents is read.
        """
        compressed = attended[..., : self.compressed_dim]
        return torch.einsum("brhc,hvc->brhv", compressed, self._value_weight)


def hook_latent_attention(model: PreTrainedModel) -> None:
    """Make every layer of a model pass its latents on, in place of each head's K and V."""
    for layer in model.model.layers:
        layer.self_attn.expand_kv = _keep_latents


def _keep_latents(compressed: Tensor, rotary: Tensor) -> tuple[Tensor, Tensor]:
    return compressed, rotary
