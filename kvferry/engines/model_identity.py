"""Read from a model's directory the fields that must be equal on both sides of a transfer."""

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
"""Fields of a config.json that do not change the model's results."""


def model_directory(model: str, *, revision: str | None = None) -> Path:
    """Return the local directory of a model: `model` itself, or its directory in the hub's cache. Does not use the network.

    Args:
        revision: Branch, tag or commit in the hub; None means the main branch. It has no effect on a directory.

    Raises:
        ConfigError: Neither exists.
    """
    if Path(model).is_dir():
        return Path(model)
    try:
        found = cached_file(model, "config.json", revision=revision, local_files_only=True)
    except (OSError, ValueError):
        found = None
    if found is None:
        named = repr(model) if revision is None else f"{model!r} of revision {revision!r}"
        raise ConfigError(f"model is {named}, which is neither a directory nor in the hub's cache")
    return Path(found).parent


def model_fields(model: str, *, revision: str | None = None, changes: Mapping[str, object] | None = None) -> dict[str, str]:
    """Return the fields that must be equal on both sides, as name -> text. They do not depend on the directory's path.

    For a model of the embedded engine they are that engine's own fields, so that its nodes can be joined. For other models they
    are the architecture, a digest of config.json and a digest of the weights.

    Args:
        model: Directory, or a name in the hub's cache.
        revision: See `model_directory`.
        changes: Settings of the engine that change the model's results, such as a quantisation. None, "" and "{}" count as
            absent.

    Raises:
        ConfigError: The model is missing or damaged.
    """
    directory = model_directory(model, revision=revision)
    config = read_config(directory)
    try:
        fields = dict(read_model_files(directory).fields)
    except ConfigError:
        fields = _other_fields(directory, config)  # the embedded engine does not run it
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
    if any((directory / name).exists() for name in (WEIGHTS_NAME, INDEX_NAME)):
        fields["weights"] = f"xxh3-128:{weights_digest(stored_tensors(directory))}"
    return fields
