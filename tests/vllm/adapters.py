"""LoRA adapters with random weights for the tests' model."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

RANK = 8
MODULES = ("q_proj", "k_proj", "v_proj", "o_proj")


def make_adapter(directory: Path, model: Path, *, seed: int) -> Path:
    """Make an adapter of the attention layers in PEFT's format, which changes nearly every generated token."""
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    hidden, heads = config["hidden_size"], config["num_attention_heads"] * config["head_dim"]
    kv_heads = config["num_key_value_heads"] * config["head_dim"]
    sizes = {"q_proj": (hidden, heads), "k_proj": (hidden, kv_heads), "v_proj": (hidden, kv_heads), "o_proj": (heads, hidden)}
    random = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in range(config["num_hidden_layers"]):
        for module in MODULES:
            inner, outer = sizes[module]
            name = f"base_model.model.model.layers.{layer}.self_attn.{module}"
            tensors[f"{name}.lora_A.weight"] = torch.randn(RANK, inner, generator=random) / inner**0.5
            tensors[f"{name}.lora_B.weight"] = torch.randn(outer, RANK, generator=random) / RANK**0.5
    directory.mkdir(parents=True, exist_ok=True)
    settings = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": RANK, "lora_alpha": RANK, "bias": "none"}
    settings |= {"target_modules": list(MODULES), "base_model_name_or_path": "demo", "lora_dropout": 0.0}
    (directory / "adapter_config.json").write_text(json.dumps(settings), encoding="utf-8")
    save_file(tensors, directory / "adapter_model.safetensors")
    return directory
