"""Fixtures for all tests of manifests."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.authority import Authority


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a model directory with the files that are checked before a node starts."""
    folder = tmp_path_factory.mktemp("models") / "model"
    folder.mkdir()
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "torch_dtype": "float32",
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 2,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "head_dim": 32,
        "vocab_size": 1024,
        "max_position_embeddings": 4096,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(bytes(1 << 20))
    return folder


@pytest.fixture(scope="session")
def authority() -> Authority:
    return Authority()
