"""Multi-head latent attention (MLA): the pool keeps one latent per token, from which every head makes its own K and V.

Source: DeepSeek-V2 (arXiv 2405.04434), section 2.1. A latent is the compressed KV and, beside it, the rotary key that all heads
share. Query heads are cut over the ranks of a TP group; the latent is the same on every one of them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, PreTrainedModel

from embedded_engine.attention import Scores
from embedded_engine.paged_attention import StepPlan

LATENT_ATTENTION_NAME = "kvferry_paged_latent"


class ProjectedHeads:
    """The heads of one MLA layer of this rank, see `LatentHeads`; the layer's own weights, nothing is copied.

    Args:
        module: transformers' attention layer.
    """

    def __init__(self, module: Any) -> None:
        self._module = module
        self.value_dim: int = module.v_head_dim
        self.compressed_dim: int = module.kv_lora_rank
        joined = module.kv_b_proj.weight.view(-1, module.qk_nope_head_dim + module.v_head_dim, module.kv_lora_rank)
        self._key_weight, self._value_weight = joined.split([module.qk_nope_head_dim, module.v_head_dim], dim=1)

    def expand(self, latents: Tensor) -> tuple[Tensor, Tensor]:
        module = self._module
        compressed, rotary = latents.transpose(0, 1).unsqueeze(0).split([module.kv_lora_rank, module.qk_rope_head_dim], dim=-1)
        k, v = type(module).expand_kv(module, compressed, rotary)
        return k, v

    def absorb(self, query: Tensor) -> Tensor:
        """(W_K c) . q is c . (W_K^T q): the head's key projection moves to the query."""
        plain, rotary = query.split([self._module.qk_nope_head_dim, self._module.qk_rope_head_dim], dim=-1)
        return torch.cat((plain @ self._key_weight, rotary), dim=-1)

    def values(self, attended: Tensor) -> Tensor:
        """The weighted sum of W_V c is W_V times the weighted sum of c."""
        compressed = attended[..., : self.compressed_dim]
        return torch.einsum("brhc,hvc->brhv", compressed, self._value_weight)


def latent_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    paged_plan: StepPlan,
    **_: Any,
) -> tuple[Tensor, None]:
    """The function that transformers' MLA layers call; `key` and `value` are what `_keep_latents` left of them."""
    latents = torch.cat((key, value), dim=-1)[0].transpose(0, 1)
    heads = ProjectedHeads(module)
    return paged_plan.attend_latent(module.layer_idx, query, latents, heads, Scores(scale=scaling)), None


AttentionInterface.register(LATENT_ATTENTION_NAME, latent_attention)


def hook_latent_attention(model: PreTrainedModel) -> None:
    """Have every layer of a model hand on its latents as they are, in place of each head's K and V."""
    for layer in model.model.layers:
        layer.self_attn.expand_kv = _keep_latents


def _keep_latents(compressed: Tensor, rotary: Tensor) -> tuple[Tensor, Tensor]:
    return compressed, rotary
