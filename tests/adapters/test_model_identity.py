"""What two engines' models must have in common, read from their directories."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from huggingface_hub import constants
from safetensors.torch import save_file

from embedded_engine.model_files import read_model_files
from kvferry.engines.model_identity import model_directory, model_fields
from transfer.errors import ConfigError

LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 32, "hidden_size": 16, "intermediate_size": 32,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128,
}  # fmt: skip


def written(directory: Path, config: dict[str, object], *, seed: int = 0) -> str:
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(config), encoding="utf-8")
    weights = torch.randn(4, 4, generator=torch.Generator().manual_seed(seed))
    save_file({"model.norm.weight": weights}, directory / "model.safetensors")
    return str(directory)


def test_a_model_of_ours_has_the_same_fields_as_in_our_nodes(tmp_path: Path) -> None:
    model = written(tmp_path / "llama", LLAMA)
    assert model_fields(model) == read_model_files(model).fields


def test_other_architectures_are_told_apart_by_config_and_weights(tmp_path: Path) -> None:
    other = {**LLAMA, "architectures": ["FarAwayForCausalLM"], "model_type": "far_away"}
    first = model_fields(written(tmp_path / "a", {**other, "transformers_version": "5.1"}))
    assert first == model_fields(written(tmp_path / "b", {**other, "transformers_version": "5.2"}))
    assert first["architecture"] == "FarAwayForCausalLM"
    assert first["weights"] != model_fields(written(tmp_path / "c", other, seed=1))["weights"]
    assert first["config"] != model_fields(written(tmp_path / "d", {**other, "rope_theta": 5.0}))["config"]


def test_settings_of_the_engine_are_part_of_the_models_identity(tmp_path: Path) -> None:
    model = written(tmp_path / "llama", LLAMA)
    plain = model_fields(model, changes={"quantization": None, "override": "{}"})
    assert plain == model_fields(model)
    assert model_fields(model, changes={"quantization": "fp8"}) == {**plain, "engine.quantization": "fp8"}


def test_a_revision_of_a_model_in_the_hubs_cache_has_its_own_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two instances that serve other revisions of one name must not be joined."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    cached = tmp_path / "models--some--model"
    commits = ["a" * 40, "b" * 40]
    for directory in ("refs", "snapshots"):
        (cached / directory).mkdir(parents=True)
    for seed, (name, commit) in enumerate(zip(("main", "v2"), commits, strict=True)):
        (cached / "refs" / name).write_text(commit, encoding="utf-8")
        written(cached / "snapshots" / commit, LLAMA, seed=seed)
    main, second = (model_fields("some/model", revision=revision) for revision in (None, "v2"))
    assert main == model_fields("some/model") and main["weights"] != second["weights"]
    with pytest.raises(ConfigError, match="model is 'some/model' of revision 'v3', which is neither a directory nor in the hub"):
        model_fields("some/model", revision="v3")
    directory = str(cached / "snapshots" / commits[0])
    assert model_fields(directory, revision="v3") == main


def test_a_model_that_is_nowhere_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="model is 'nobody/nothing', which is neither a directory nor in the hub's cache"):
        model_directory("nobody/nothing")
    with pytest.raises(ConfigError, match=r"config\.json"):
        model_fields(str(tmp_path))
