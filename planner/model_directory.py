"""Read a Hugging Face directory for the memory plan: the model's shape, and the size of its weights."""

from __future__ import annotations

import json
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Final

from planner.config_fields import shown
from planner.model_shape import ModelShape, read_model_shape
from transfer.errors import ConfigError

WEIGHTS_NAME: Final = "model.safetensors"
INDEX_NAME: Final = "model.safetensors.index.json"

# Some directories also hold the weights in their author's format, consolidated*, which transformers does not load.
_WEIGHT_NAMES: Final = (WEIGHTS_NAME, "model-*-of-*.safetensors", "*.safetensors")
_MOST_BYTES: Final = 1 << 60


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelDirectory:
    """A model directory; a ``config.json`` alone is enough for a plan.

    Args:
        checkpoint_bytes: Size of the stored weights; None if the directory has none.
        checkpoint_source: Source of that size: the index, or the files.
    """

    shape: ModelShape
    checkpoint_bytes: int | None
    checkpoint_source: str = ""


def read_model_directory(directory: Path | str, *, draft: Path | None = None) -> ModelDirectory:
    """Read ``config.json`` and the size of the weights; opens no weights.

    Args:
        draft: Directory of the draft model. The result then has both models, see `ModelShape.with_draft_model`.

    Raises:
        ConfigError: A directory or its ``config.json`` is missing or damaged, or the model is unknown.
    """
    if draft is not None:
        model, own = read_model_directory(directory), read_model_directory(draft)
        sizes = (model.checkpoint_bytes, own.checkpoint_bytes)
        return ModelDirectory(
            shape=model.shape.with_draft_model(own.shape),
            checkpoint_bytes=None if None in sizes else sum(size or 0 for size in sizes),
            checkpoint_source=f"{model.checkpoint_source}, with the draft model",
        )
    try:
        return _read_directory(Path(directory))
    except OSError as error:
        raise ConfigError(f"{error.filename or directory} cannot be read: {error.strerror}") from error


def _read_directory(directory: Path) -> ModelDirectory:
    if not directory.is_dir():
        raise ConfigError(
            f"model is {str(directory)!r}, which is not a directory; it must be a local Hugging Face model directory"
            f"{download_hint(directory)}"
        )
    shape = read_model_shape(read_config(directory), source=str(directory / "config.json"))
    index_path = directory / INDEX_NAME
    if index_path.exists():
        return ModelDirectory(shape=shape, checkpoint_bytes=_total_size(index_path), checkpoint_source=INDEX_NAME)
    files = _weight_files(directory)
    if not files:
        return ModelDirectory(shape=shape, checkpoint_bytes=None)
    size = sum(file.stat().st_size for file in files)
    return ModelDirectory(shape=shape, checkpoint_bytes=size, checkpoint_source=f"{len(files)} safetensors files")


def _weight_files(directory: Path) -> list[Path]:
    found = sorted(directory.glob("*.safetensors"))
    named = ([file for file in found if fnmatchcase(file.name, name)] for name in _WEIGHT_NAMES)
    return next((files for files in named if files), [])


def _total_size(path: Path) -> int:
    metadata = read_json(path).get("metadata")
    size = metadata.get("total_size") if isinstance(metadata, dict) else None
    if isinstance(size, float) and size.is_integer():  # some converters write 1.6e10
        size = int(size)
    if not isinstance(size, int) or isinstance(size, bool) or not 1 <= size <= _MOST_BYTES:
        raise ConfigError(f"{path}: metadata.total_size is {shown(size)}; must be the size of all weights in bytes")
    return size


def download_hint(directory: Path) -> str:
    """Return how to download a model if `directory` is not a folder but looks like a name of Hugging Face's hub."""
    is_name = len(directory.parts) == 2 and not directory.is_absolute() and not directory.exists() and directory.parts[0] != ".."
    return f"; to download a model of that name: hf download {directory} --local-dir {directory}" if is_name else ""


def read_config(directory: Path) -> dict[str, Any]:
    """Read config.json of a model directory; raises as `read_json`."""
    hint = f"a Hugging Face model directory has one{download_hint(directory)}"
    return read_json(directory / "config.json", hint=hint)


def read_json(path: Path, *, hint: str = "") -> dict[str, Any]:
    """Read a JSON object.

    Args:
        hint: Added to the error of a missing file.

    Raises:
        ConfigError: The file is missing, unreadable, or has no JSON object.
    """
    try:
        content = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise ConfigError(f"{path} is missing; {hint}") from None
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
    except RecursionError:
        raise ConfigError(f"{path} is nested too deeply; must be the JSON object of a Hugging Face model") from None
    except ValueError as error:
        raise ConfigError(f"{path} is not valid JSON: {' '.join(str(error).split())[:240]}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path} holds a JSON {type(content).__name__}; must be an object")
    return content
