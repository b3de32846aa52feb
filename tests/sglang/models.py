"""Tiny models of families that SGLang runs on a CPU, beside the demo's."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from kvferry.demo.kinds import ATTENTION_SHARE, MLP_SHARE, NUM_LAYERS, QUERY_KEY_SCALE, WINDOW_TOKENS, DemoKind
from kvferry.demo.model import make_demo_model

NUM_FULL_LAYERS: Final = NUM_LAYERS // 4
ROPE: Final = {"rope_type": "default", "rope_theta": 10_000.0}

WINDOWS: Final = DemoKind(
    family="Mellum",
    config_class="MellumConfig",
    config={
        "layer_types": ["full_attention" if layer % 4 == 3 else "sliding_attention" for layer in range(NUM_LAYERS)],
        "mlp_layer_types": ["dense"] * NUM_LAYERS,
        "sliding_window": WINDOW_TOKENS,
        "rope_parameters": {"full_attention": ROPE, "sliding_attention": ROPE},
    },
    gains={"o_proj": ATTENTION_SHARE, "down_proj": MLP_SHARE},
    norms={"q_norm": QUERY_KEY_SCALE, "k_norm": QUERY_KEY_SCALE},
)
"""SGLang keeps the windows of Gemma 3 in a pool for all tokens. Mellum's are in a pool of their own."""


def make_windows_model(directory: Path) -> Path:
    return make_demo_model(directory, kind=WINDOWS)
