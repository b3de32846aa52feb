"""What must be equal of two engines' models for the KV of one to be of use to the other, read from the model's directory."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from transformers.utils.hub import cached_file

from embedded_engine.model_files import read_model_files, stored_tensors, weights_digest
from planner.model_directory import INDEX_NAME, WEIGHTS_NAME, read_config
from transfer.errors import ConfigError

_VOLATILE: Final = frozenset({"_name_or_path", "dtype", "torch_dtype", "transformers_version", "use_cache", "auto_map"})
"""Fields of a config.json that say who wrote it or how it is to be loaded, and nothing of what the model computes."""


def model_directory(model: str) -> Path:
    """The local directory of a model: `model` itself, or where the hub's cache has it; never asks the network.

    Raises:
        ConfigError: Neither is there.
    """
    if Path(model).is_dir():
        return Path(model)
    try:
        found = cached_file(model, "config.json", local_files_only=True)
    except (OSError, ValueError):
        found = None
    if found is None:
        raise ConfigError(f"model is {model!r}, which is neither a directory nor in the hub's cache; must be one that is loaded")
    return Path(found).parent


def model_fields(model: str, *, changes: Mapping[str, object] | None = None) -> dict[str, str]:
    """What must be equal on both sides of a transfer, as name -> text; does not depend on where the directory is.

    Of a model that the embedded engine can run, these are the fields that it tells too, so that an engine can meet our own nodes.
    Of any other they are the architecture, a digest of config.json, and one of the weights.

    Args:
        model: Directory, or a name in the hub's cache.
        changes: Settings of the engine by which it computes other numbers than the directory's model, such as a quantisation;
            those that are None, empty or "{}" count as absent.

    Raises:
        ConfigError: The model is not there, or damaged.
    """
    directory = model_directory(model)
    config = read_config(directory)
    try:
        fields = dict(read_model_files(directory).fields)
    except ConfigError:
        fields = _other_fields(directory, config)  # not one that the embedded engine runs
    for name, value in (changes or {}).items():
        if value not in (None, "", "{}"):
            fields[f"engine.{name}"] = str(value)
    return fields


def _other_fields(directory: Path, config: Mapping[str, Any]) -> dict[str, str]:
    kept = {name: value for name, value in config.items() if name not in _VOLATILE}
    text = json.dumps(kept, sort_keys=True, separators=(",", ":"), default=str)
    fields = {
        "architecture": ", ".join(map(str, config.get("architectures") or ["unnamed"])),
        "config": f"sha256:{hashlib.sha256(text.encode()).hexdigest()[:32]}",
    }
    if _has_weights(directory):
        fields["weights"] = f"xxh3-128:{weights_digest(stored_tensors(directory))}"
    return fields


def _has_weights(directory: Path) -> bool:
    return any((directory / name).exists() for name in (WEIGHTS_NAME, INDEX_NAME))
