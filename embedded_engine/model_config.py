"""What a model's config.json alone already forbids. Plain JSON: it loads neither torch nor transformers, which take seconds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

from embedded_engine.architectures import ARCHITECTURES, check_cut
from transfer.errors import ConfigError
from transfer.memory.config_fields import shown

WEIGHTS_NAME: Final = "model.safetensors"
INDEX_NAME: Final = "model.safetensors.index.json"


def read_config(directory: Path) -> dict[str, Any]:
    """The object in config.json of a model directory.

    Raises:
        ConfigError: It is missing, unreadable, or no JSON object.
    """
    return read_json(directory / "config.json", hint="a Hugging Face model directory has one")


def read_json(path: Path, *, hint: str) -> dict[str, Any]:
    """The JSON object in a file.

    Args:
        hint: What to say of a file that is missing.

    Raises:
        ConfigError: It is missing, unreadable, or no JSON object.
    """
    try:
        raw = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise ConfigError(f"{path} is missing; {hint}") from None
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
    except RecursionError:
        raise ConfigError(f"{path} is nested too deeply; must be the JSON object of a Hugging Face model") from None
    except ValueError as error:
        raise ConfigError(f"{path} is not valid JSON: {one_line(error)}") from error
    if not isinstance(raw, dict):
        raise ConfigError(f"{path} holds a JSON {type(raw).__name__}; must be an object")
    return raw


def check_before_start(model: Path, tp_size: int, *, dummy_weights: bool) -> None:
    """Refuse what no rank could load, before any is started. A size that config.json leaves to its class is left to the ranks.

    Raises:
        ConfigError: config.json is damaged, of a model that is not served, or the TP size does not fit it; or there are no
            weights.
    """
    config = read_config(model)
    if not dummy_weights:
        check_is_plain(model, config)
        if not any((model / name).exists() for name in (WEIGHTS_NAME, INDEX_NAME)):
            raise no_weights(model)
    check_cut(architecture_of(model, config), tp_size, config)


def check_is_plain(directory: Path, config: dict[str, Any]) -> None:
    """Refuse quantised weights.

    Raises:
        ConfigError: config.json says that the weights are quantised.
    """
    if config.get("quantization_config") is not None:
        raise ConfigError(f"{directory / 'config.json'}: quantization_config is set; must be a model with plain weights")


def no_weights(directory: Path) -> ConfigError:
    return ConfigError(f"{directory} has neither {WEIGHTS_NAME} nor {INDEX_NAME}; weights must be in safetensors files")


def architecture_of(directory: Path, config: dict[str, Any]) -> str:
    """The one architecture that config.json names.

    Raises:
        ConfigError: It names none, several, or one that the embedded engine does not run.
    """
    named = config.get("architectures")
    if not isinstance(named, list) or len(named) != 1 or not isinstance(named[0], str) or named[0] not in ARCHITECTURES:
        supported = ", ".join(ARCHITECTURES)
        raise ConfigError(f"{directory / 'config.json'}: architectures is {shown(named)}; must name one of {supported}")
    return named[0]


def one_line(error: BaseException, limit: int = 240) -> str:
    """An exception of a foreign library as one line of bounded length, for our own messages."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= limit else text[: limit - 3] + "..."
