"""The size of a checkpoint: from its index, else from its files, else unknown; a damaged file is said in one line."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from planner.model_directory import INDEX_NAME, read_model_directory
from transfer.errors import ConfigError

QWEN = Path(__file__).parent / "configs" / "qwen3-8b.json"


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    shutil.copy(QWEN, tmp_path / "config.json")
    return tmp_path


def test_without_weights_the_size_is_unknown(directory: Path) -> None:
    found = read_model_directory(directory)
    assert found.checkpoint_bytes is None
    assert found.shape.architecture == "Qwen3ForCausalLM"


@pytest.mark.parametrize("size", [16381470720, 16381470720.0])
def test_the_index_goes_before_the_files(directory: Path, size: float) -> None:
    (directory / "model.safetensors").write_bytes(bytes(100))
    (directory / INDEX_NAME).write_text(json.dumps({"metadata": {"total_size": size}, "weight_map": {}}))
    found = read_model_directory(str(directory))
    assert (found.checkpoint_bytes, found.checkpoint_source) == (16381470720, INDEX_NAME)


def test_without_an_index_the_files_are_added_up(directory: Path) -> None:
    for number, size in enumerate((100, 23)):
        (directory / f"model-{number}.safetensors").write_bytes(bytes(size))
    (directory / "pytorch_model.bin").write_bytes(bytes(1000))
    found = read_model_directory(directory)
    assert (found.checkpoint_bytes, found.checkpoint_source) == (123, "2 safetensors files")


@pytest.mark.parametrize(
    ("names", "num_counted"),
    [
        (["model.safetensors", "consolidated.safetensors", "model-00001-of-00002.safetensors"], 1),
        (["consolidated-00001-of-00002.safetensors", "consolidated-00002-of-00002.safetensors"], 2),
    ],
)
def test_weights_that_are_there_twice_are_counted_once(directory: Path, names: list[str], num_counted: int) -> None:
    for number, name in enumerate(names):
        (directory / name).write_bytes(bytes(10**number))
    found = read_model_directory(directory)
    assert (found.checkpoint_bytes, found.checkpoint_source) == ([1, 11][num_counted - 1], f"{num_counted} safetensors files")


def test_a_link_to_weights_that_are_gone_is_named(directory: Path) -> None:
    (directory / "model.safetensors").symlink_to(directory / "gone")
    with pytest.raises(ConfigError, match=r"model\.safetensors cannot be read: No such file or directory"):
        read_model_directory(directory)


@pytest.mark.parametrize(
    "metadata",
    [
        None, [1], {}, {"total_size": "16 GB"}, {"total_size": True}, {"total_size": 0}, {"total_size": 10**320},
        {"total_size": 1e308}, {"total_size": float("inf")}, {"total_size": float("nan")},
    ],
)  # fmt: skip
def test_a_size_that_is_no_number_is_refused(directory: Path, metadata: object) -> None:
    (directory / INDEX_NAME).write_text(json.dumps({"metadata": metadata}))
    with pytest.raises(ConfigError, match=r"metadata\.total_size is .{0,40}; must be the size of all weights in bytes"):
        read_model_directory(directory)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{", "config.json is not valid JSON: "),
        (b"[]", "config.json holds a JSON list; must be an object"),
        (b'{"a":' * 100_000, "config.json is nested too deeply; must be "),
    ],
)
def test_a_damaged_configuration_is_refused(directory: Path, content: bytes, message: str) -> None:
    (directory / "config.json").write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        read_model_directory(directory)


def test_missing_files_of_a_model_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nowhere', which is not a directory"):
        read_model_directory(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match=r"config\.json is missing"):
        read_model_directory(tmp_path)
    (tmp_path / "config.json").mkdir()
    with pytest.raises(ConfigError, match=r"config\.json cannot be read: Is a directory"):
        read_model_directory(tmp_path)


def test_a_draft_model_adds_its_layers_and_weights(directory: Path, tmp_path: Path) -> None:
    """Both are one model of more layers: the plan counts the KV and the weights of both."""
    draft = tmp_path / "draft"
    draft.mkdir()
    small = json.loads(QWEN.read_text()) | {"num_hidden_layers": 3, "num_key_value_heads": 4, "max_position_embeddings": 1024}
    (draft / "config.json").write_text(json.dumps(small))
    model, own = read_model_directory(directory).shape, read_model_directory(draft).shape
    joined = read_model_directory(directory, draft=draft)
    assert joined.shape.layout().layers == (*model.layout().layers, *own.layout().layers)
    assert joined.shape.weights_bytes() == model.weights_bytes() + own.weights_bytes()
    assert joined.shape.max_context_tokens == 1024
    assert joined.checkpoint_bytes is None
    for place, size in ((directory, 100), (draft, 20)):
        (place / "model.safetensors").write_bytes(bytes(size))
    found = read_model_directory(directory, draft=draft)
    assert (found.checkpoint_bytes, found.checkpoint_source) == (120, "1 safetensors files, with the draft model")
