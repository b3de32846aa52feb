"""Models with draft layers, with random weights: a Llama with EAGLE-3, and a DeepSeek-V3 with one MTP layer.

Random drafts are almost never right. So the models generate `FEW` tokens only, and the drafts are of these tokens. Then a part of
the drafts is accepted, and their number shows whether draft layers have the KV of the prompt.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

FEW = 4
"""The last tokens of the vocabulary."""

AUX_LAYERS = (1, 2, 3)
"""Layers whose hidden states EAGLE-3 reads."""


def make_few_words(directory: Path, model: Path) -> Path:
    """Copy a model, such that it generates `FEW` tokens only."""
    shutil.copytree(model, directory)
    keep_few_words(directory)
    return directory


def keep_few_words(directory: Path) -> None:
    """Give all other tokens of a model the logit 0. The logits of the few have the sum 0, so one of them exceeds it."""

    def with_few(weights: dict[str, Tensor]) -> dict[str, Tensor]:
        weights["lm_head.weight"][:-FEW] = 0
        weights["lm_head.weight"][-FEW:] -= weights["lm_head.weight"][-FEW:].mean(0)
        return weights

    _change(directory, with_few)


def add_mtp_layer(directory: Path) -> None:
    """Add an MTP layer to a DeepSeek-V3: random, with attention and MLP of another layer."""
    config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    own, hidden = config["num_hidden_layers"], config["hidden_size"]
    config["first_k_dense_replace"] = own + 1
    (directory / "config.json").write_text(json.dumps(config), encoding="utf-8")

    def with_mtp(weights: dict[str, Tensor]) -> dict[str, Tensor]:
        layer = f"model.layers.{own}"
        alike = {
            name.replace("model.layers.2.", f"{layer}."): tensor.clone()
            for name, tensor in weights.items()
            if ".layers.2." in name
        }
        return weights | alike | {
            f"{layer}.enorm.weight": torch.ones(hidden),
            f"{layer}.hnorm.weight": torch.ones(hidden),
            f"{layer}.eh_proj.weight": _random(hidden, 2 * hidden, seed=1),
            f"{layer}.shared_head.norm.weight": torch.ones(hidden),
            f"{layer}.shared_head.head.weight": weights["lm_head.weight"].clone(),
            f"{layer}.embed_tokens.weight": weights["model.embed_tokens.weight"].clone(),
        }  # fmt: skip

    _change(directory, with_mtp)


def make_eagle3(directory: Path, model: Path, *, seed: int = 0) -> Path:
    """Make a draft model of one layer for a Llama. It drafts the tokens of `keep_few_words`."""
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    heads, kv_heads = (config[name] * config["head_dim"] for name in ("num_attention_heads", "num_key_value_heads"))
    config |= {
        "architectures": ["LlamaForCausalLMEagle3"],
        "num_hidden_layers": 1,
        "draft_vocab_size": FEW,
        "eagle_aux_hidden_state_layer_ids": list(AUX_LAYERS),
    }
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(config), encoding="utf-8")
    attention = {"q_proj": (heads, 2 * hidden), "k_proj": (kv_heads, 2 * hidden), "v_proj": (kv_heads, 2 * hidden)}
    sizes = {f"midlayer.self_attn.{name}.weight": size for name, size in attention.items()} | {
        "midlayer.self_attn.o_proj.weight": (hidden, heads),
        "midlayer.mlp.gate_proj.weight": (inner, hidden),
        "midlayer.mlp.up_proj.weight": (inner, hidden),
        "midlayer.mlp.down_proj.weight": (hidden, inner),
        "fc.weight": (hidden, len(AUX_LAYERS) * hidden),
        "lm_head.weight": (FEW, hidden),
    }
    weights = {name: _random(*size, seed=seed + number) for number, (name, size) in enumerate(sizes.items())}
    weights["midlayer.self_attn.o_proj.weight"] *= 4  # attention decides the drafts
    for norm in ("norm", "midlayer.hidden_norm", "midlayer.input_layernorm", "midlayer.post_attention_layernorm"):
        weights[f"{norm}.weight"] = torch.ones(hidden)
    first = config["vocab_size"] - FEW
    few = {"d2t": torch.full((FEW,), first), "t2d": torch.arange(config["vocab_size"]) >= first}
    save_file(weights | few, directory / "model.safetensors")
    return directory


def draft_layer_bytes(config: Mapping[str, Any]) -> int:
    """Return the bytes of a token in one layer, in float32. The draft layer has the size of the others."""
    return 4 * 2 * int(config["num_key_value_heads"]) * int(config["head_dim"])


def _change(directory: Path, change: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> None:
    path = directory / "model.safetensors"
    save_file(change(load_file(path)), path, metadata={"format": "pt"})


def _random(rows: int, columns: int, *, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, columns, generator=generator) / columns**0.5
