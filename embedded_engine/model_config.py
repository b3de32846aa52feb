"""What a model's config.json alone already forbids. Plain JSON: it loads neither torch nor transformers, which take seconds."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from transfer.errors import ConfigError

CUT_SIZES: Final = ("num_key_value_heads", "num_attention_heads", "intermediate_size", "vocab_size")
"""What tensor parallelism divides among the ranks."""


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
    except ValueError as error:
        raise ConfigError(f"{path} is not valid JSON: {one_line(error)}") from error
    if not isinstance(raw, dict):
        raise ConfigError(f"{path} holds a JSON {type(raw).__name__}; must be an object")
    return raw


def check_tp_size(tp_size: int, sizes: Mapping[str, int]) -> None:
    """Refuse a TP size that does not divide what it cuts.

    Args:
        sizes: `CUT_SIZES` of the model, or those of them that are known.

    Raises:
        ConfigError: The message names what it does not divide, and the TP sizes that would do.
    """
    for name, value in sizes.items():
        if value % tp_size:
            fitting = [tp for tp in range(1, min(sizes.values()) + 1) if all(v % tp == 0 for v in sizes.values())]
            raise ConfigError(
                f"tp_size is {tp_size}, which does not divide the model's {name} {value}; "
                f"must be one of {', '.join(map(str, fitting))}"
            )


def check_before_start(model: Path, tp_size: int) -> None:
    """Refuse what no rank could load, before any is started. A size that config.json leaves to its class is left to the ranks.

    Raises:
        ConfigError: config.json is damaged, or the TP size does not fit the model.
    """
    config = read_config(model)
    sizes = {name: config.get(name) for name in CUT_SIZES}
    check_tp_size(tp_size, {name: size for name, size in sizes.items() if type(size) is int and size > 0})


def one_line(error: BaseException, limit: int = 240) -> str:
    """An exception of a foreign library as one line of bounded length, for our own messages."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= limit else text[: limit - 3] + "..."
