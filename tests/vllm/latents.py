"""A DeepSeek-V3 with random weights, and the settings with which vLLM 0.32 computes it correctly on a CPU."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from kvferry.demo.kinds import KINDS, ModelKind
from kvferry.demo.model import make_demo_model

BLOCK_SIZE = 16
"""The only one of vLLM's kernel for CPUs."""

BACKEND = "CPU_MLA"
"""The default on CPUs with AMX has no float32."""

ARGS = ("-cc.custom_ops+=all", "-cc.custom_ops+=-rotary_embedding", "--attention-backend", BACKEND)
"""Rotate queries and keys with torch.

With --enforce-eager, vLLM takes its kernel, which expects [tokens, heads * size] and gets [tokens, heads, size].
It then rotates some heads of the first tokens of a step, so tokens depend on what else the step computes.
"""


def make_latents(directory: Path) -> Path:
    """Make a demo model with the only size of a latent that vLLM's kernel for CPUs has."""
    kind = KINDS[ModelKind.MLA]
    sizes = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "head_dim": 64}
    return make_demo_model(directory, kind=replace(kind, config={**kind.config, **sizes}))


def latent_layer_bytes(config: Mapping[str, Any]) -> int:
    """Return the bytes of a token in one layer, in float32."""
    return 4 * (int(config["kv_lora_rank"]) + int(config["qk_rope_head_dim"]))
