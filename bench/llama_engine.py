"""Engines with a Llama of the 8B's shape and made-up weights, for benchmarks of steps."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from embedded_engine.engine import EmbeddedEngine
from embedded_engine.model_files import ModelFiles, read_model_files
from transfer.layout import KVLayout, Shard

QUERY_HEADS, KV_HEADS, HEAD_DIM, PAGE_SIZE = 32, 8, 128, 16
_CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 32_000, "hidden_size": 4096,
    "intermediate_size": 14_336, "num_attention_heads": QUERY_HEADS, "num_key_value_heads": KV_HEADS, "head_dim": HEAD_DIM,
    "max_position_embeddings": 1 << 20, "rms_norm_eps": 1e-5, "rope_theta": 500_000.0, "hidden_act": "silu",
    "tie_word_embeddings": False, "dtype": "bfloat16", "bos_token_id": 0, "eos_token_id": 1,
}  # fmt: skip
_TINY = {
    "vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 16, "dtype": "float32",
}  # fmt: skip


def llama_config(num_layers: int) -> dict[str, object]:
    """Return the content of config.json."""
    return _CONFIG | {"num_hidden_layers": num_layers}


@contextmanager
def _model_files(num_layers: int, *, is_tiny: bool) -> Iterator[ModelFiles]:
    with tempfile.TemporaryDirectory(prefix="kvferry-bench-") as folder:
        config = llama_config(num_layers) | (_TINY if is_tiny else {})
        (Path(folder) / "config.json").write_text(json.dumps(config))
        yield read_model_files(folder, dummy_seed=0)


def llama_layout(num_layers: int) -> KVLayout:
    with _model_files(num_layers, is_tiny=False) as files:
        return files.layout()


def llama_engine(
    device: str,
    *,
    num_layers: int,
    num_pages: int,
    max_seq_len: int,
    max_running_requests: int | None,
    is_tiny: bool = False,
    **settings: Any,
) -> EmbeddedEngine:
    """Return an engine with TP 1 and pages of `PAGE_SIZE` tokens; `is_tiny` shrinks the model, for a CPU.

    Args:
        settings: Further arguments of `EmbeddedEngine`.
    """
    with _model_files(num_layers, is_tiny=is_tiny) as files:
        return EmbeddedEngine(
            files,
            shard=Shard(page_size=PAGE_SIZE),
            num_pages=num_pages,
            device=device,
            max_seq_len=max_seq_len,
            max_running_requests=max_running_requests,
            **settings,
        )
