"""A Llama that finds a needle in a haystack, made by hand, without training.

Two layers, hidden size 256, four query heads of which one works. Every token has a code, a row of a Hadamard matrix, so that
codes of different tokens are orthogonal. The first layer's head attends to the token before and copies its code: rotary angles
alone decide where it looks. The second layer's head attends to positions whose token before is the query's own token (an
induction head, Olsson and others, 2022), and copies their token's code to the output. So after "key value ... key" it says
"value". It computes the match in the dimensions that rotary embedding turns by less than 0.2 rad over 200,000 tokens.

The score of a match is `MATCH_SCORE`, and of anything else 0: this decides how much of the estimate's mean over `stride` products
a match is.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

NUM_TOKENS = 64
"""Tokens of the vocabulary; also elements of a code."""

MATCH_SCORE = 128.0
_HEAD_DIM = 128
_HIDDEN = 256
_ROPE_THETA = 1e12
_CODE, _BEFORE, _OUT, _ONE = (slice(64 * part, 64 * (part + 1)) for part in range(4))
_NEIGHBOUR_SCORE = 60.0
"""Score of the token before is up to 64 times this; of other neighbours at least 0.8 times this less."""


def make_needle_model(directory: Path, dtype: torch.dtype) -> Path:
    """Save the model as a Hugging Face directory; return `directory`."""
    config = LlamaConfig(
        vocab_size=NUM_TOKENS,
        hidden_size=_HIDDEN,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=_HEAD_DIM,
        max_position_embeddings=1 << 20,
        rms_norm_eps=1e-9,
        rope_parameters={"rope_type": "default", "rope_theta": _ROPE_THETA},
        tie_word_embeddings=False,
        bos_token_id=0,
        eos_token_id=1,
        dtype=dtype,
    )
    model: Any = LlamaForCausalLM(config)
    codes = _hadamard(NUM_TOKENS)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.fill_(1.0 if "norm" in name else 0.0)
        model.model.embed_tokens.weight[:, _CODE] = codes
        model.model.embed_tokens.weight[:, _ONE] = 1.0
        _look_before(model.model.layers[0].self_attn)
        _match(model.model.layers[1].self_attn)
        model.lm_head.weight[:, _OUT] = codes
    model.to(dtype).save_pretrained(directory)
    return directory


def _hadamard(size: int) -> Tensor:
    matrix = torch.ones(1, 1)
    while len(matrix) < size:
        matrix = torch.cat((torch.cat((matrix, matrix), dim=1), torch.cat((matrix, -matrix), dim=1)))
    return matrix


def _look_before(attention: Any) -> None:
    """Of a hidden state of 128 ones and signs out of 256, so that its norm divides by sqrt(1/2)."""
    norm = (128 / _HIDDEN) ** 0.5
    angles = _ROPE_THETA ** (-torch.arange(_HEAD_DIM // 2) / (_HEAD_DIM // 2))
    scale = (_NEIGHBOUR_SCORE * _HEAD_DIM**0.5) ** 0.5 * norm / 64  # 64 ones are summed
    # A query turned by one position less than its own: the angle to a key is 0 for the token before.
    query = torch.cat((torch.cos(-angles), torch.sin(-angles)))
    key = torch.cat((torch.ones(_HEAD_DIM // 2), torch.zeros(_HEAD_DIM // 2)))
    attention.q_proj.weight[:_HEAD_DIM, _ONE] = scale * query[:, None].expand(-1, 64)
    attention.k_proj.weight[:_HEAD_DIM, _ONE] = scale * key[:, None].expand(-1, 64)
    attention.v_proj.weight[:64, _CODE] = norm * torch.eye(64)
    attention.o_proj.weight[_BEFORE, :64] = torch.eye(64)


def _match(attention: Any) -> None:
    """Of a hidden state of 192 ones and signs out of 256."""
    norm = (192 / _HIDDEN) ** 0.5
    still = torch.cat((torch.arange(32, 64), torch.arange(96, 128)))  # rotary pairs (i, i + 64) with the smallest angles
    scale = (MATCH_SCORE * _HEAD_DIM**0.5 / 64) ** 0.5 * norm
    attention.q_proj.weight[still, _CODE] = scale * torch.eye(64)
    attention.k_proj.weight[still, _BEFORE] = scale * torch.eye(64)
    attention.v_proj.weight[:64, _CODE] = norm * torch.eye(64)
    attention.o_proj.weight[_OUT, :64] = torch.eye(64)
