"""What the memory plan needs of a Hugging Face directory: the model's shape, and the size of its weights where files tell it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from transfer.errors import ConfigError
from transfer.memory.model_shape import ModelShape, read_model_shape

INDEX_NAME = "model.safetensors.index.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelDirectory:
    """A model directory, as far as it is there: a plan can be made of a ``config.json`` alone.

    Args:
        shape: The model's sizes.
        checkpoint_bytes: Size of its weights as they are stored; None where the directory holds none.
        checkpoint_source: Where that comes from: the index, or the files.
    """

    shape: ModelShape
    checkpoint_bytes: int | None
    checkpoint_source: str = ""


def read_model_directory(directory: Path | str) -> ModelDirectory:
    """Read ``config.json`` and the size of the weights; opens no weights.

    Raises:
        ConfigError: The directory or its ``config.json`` is missing, damaged, or of a model that is not known.
    """
    directory = Path(directory)
    if not directory.is_dir():
        raise ConfigError(f"model is {str(directory)!r}, which is not a directory; must be a local Hugging Face model directory")
    config_path = directory / "config.json"
    if not config_path.exists():
        raise ConfigError(f"{directory} has no config.json; must be a local Hugging Face model directory")
    shape = read_model_shape(_read_object(config_path), source=str(config_path))
    index_path = directory / INDEX_NAME
    if index_path.exists():
        return ModelDirectory(shape=shape, checkpoint_bytes=_total_size(index_path), checkpoint_source=INDEX_NAME)
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        return ModelDirectory(shape=shape, checkpoint_bytes=None)
    size = sum(file.stat().st_size for file in files)
    return ModelDirectory(shape=shape, checkpoint_bytes=size, checkpoint_source=f"{len(files)} safetensors files")


def _total_size(path: Path) -> int:
    metadata = _read_object(path).get("metadata")
    size = metadata.get("total_size") if isinstance(metadata, dict) else None
    if isinstance(size, float) and size.is_integer():  # some converters write 1.6e10
        size = int(size)
    if not isinstance(size, int) or isinstance(size, bool) or size < 1:
        raise ConfigError(f"{path}: metadata.total_size is {size!r}; must be the size of all weights in bytes")
    return size


def _read_object(path: Path) -> dict[str, object]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path} holds {type(content).__name__}; must be a JSON object")
    return content
