"""Models, prompts and transformers' own answers, made once for all engine tests."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import transformers
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from kvferry.demo.model import make_demo_model
from tests.embedded_engine.families import make_family

Generate = Callable[[Path, tuple[int, ...], int], list[int]]


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def demo_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_demo_model(tmp_path_factory.mktemp("models") / "demo")


@pytest.fixture(scope="session")
def qwen_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Qwen3 that has what the demo model lacks: tied embeddings, biases, several safetensors files."""
    directory = tmp_path_factory.mktemp("models") / "qwen"
    config = Qwen3Config(
        vocab_size=240,
        hidden_size=96,
        intermediate_size=144,
        num_hidden_layers=3,
        num_attention_heads=6,
        num_key_value_heads=6,
        head_dim=16,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        attention_bias=True,
        initializer_range=0.2,
        bos_token_id=0,
        eos_token_id=[1, 2],
        dtype="float32",
    )
    torch.manual_seed(5)
    model = Qwen3ForCausalLM(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias") or "norm" in name:
                parameter.add_(torch.randn_like(parameter) * 0.2)
    model.save_pretrained(directory, max_shard_size="200KB")
    assert (directory / "model.safetensors.index.json").exists()
    return directory


@pytest.fixture(scope="session")
def family_dir(tmp_path_factory: pytest.TempPathFactory, demo_dir: Path, qwen_dir: Path) -> Callable[[str], Path]:
    """The directory of a family's model, made when it is first asked for; "llama" is the demo's, and "qwen3" `qwen_dir`."""
    parent = tmp_path_factory.mktemp("families")
    known = {"llama": demo_dir, "qwen3": qwen_dir}

    def directory_of(name: str) -> Path:
        if name in known:
            return known[name]
        return parent / name if (parent / name).exists() else make_family(name, parent / name)

    return directory_of


@pytest.fixture(scope="session")
def generate() -> Generate:
    """Greedy tokens of transformers' own `generate`, with its own attention and cache."""
    models: dict[Path, PreTrainedModel] = {}
    known: dict[tuple[Path, tuple[int, ...]], list[int]] = {}

    def greedy(directory: Path, token_ids: tuple[int, ...], num_tokens: int) -> list[int]:
        if directory not in models:
            architecture = json.loads((directory / "config.json").read_text())["architectures"][0]
            models[directory] = getattr(transformers, architecture).from_pretrained(directory, local_files_only=True).eval()
        key = (directory, token_ids)
        if len(known.get(key, [])) < num_tokens:
            ids = torch.tensor([token_ids])
            output = models[directory].generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=num_tokens,
                do_sample=False,
                eos_token_id=[1_000_000],
                pad_token_id=0,
            )
            known[key] = output[0, len(token_ids) :].tolist()
        return known[key][:num_tokens]

    return greedy


@pytest.fixture(scope="session")
def prompts() -> dict[int, tuple[int, ...]]:
    """Prompts by length, of tokens that every model of these tests has."""
    generator = torch.Generator().manual_seed(11)
    lengths = (1, 2, 5, 15, 16, 17, 33, 64, 127, 128, 129, 257, 600)
    return {length: tuple(torch.randint(3, 240, (length,), generator=generator).tolist()) for length in lengths}
