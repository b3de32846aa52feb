"""Checks of a model's config.json, without torch and transformers, which take seconds to load."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from embedded_engine.architectures import ARCHITECTURES, check_can_speculate, check_cut, model_module
from planner.config_fields import shown
from planner.model_directory import INDEX_NAME, WEIGHTS_NAME, read_config
from transfer.errors import ConfigError

_LEAN: Final = ("embedded_engine.models_package",)
_ENGINE: Final = ("embedded_engine.loading",)


def check_before_start(
    model: Path, tp_size: int, *, dummy_weights: bool, is_speculative: bool = False, draft_model: Path | None = None
) -> None:
    """Refuse a model that no rank could load, before any is started. The ranks check sizes that config.json does not have.

    Args:
        is_speculative: Whether decode steps have draft tokens.
        draft_model: Directory of the draft model, which is checked, too.

    Raises:
        ConfigError: config.json is damaged or of an unknown model, the TP size does not fit, there are no weights, or the model
            supports no speculative decoding.
    """
    config = read_config(model)
    if not dummy_weights:
        check_is_plain(model, config)
        if not any((model / name).exists() for name in (WEIGHTS_NAME, INDEX_NAME)):
            raise no_weights(model)
    architecture = architecture_of(model, config)
    check_cut(architecture, tp_size, config)
    if is_speculative or draft_model is not None:
        check_can_speculate(architecture)
    if draft_model is not None:
        check_before_start(draft_model, tp_size, dummy_weights=dummy_weights, is_speculative=True)


def modules_of(model: Path, tp_size: int, draft_model: Path | None = None) -> tuple[str, ...]:
    """Return the modules that a rank imports to run the models; only the engine's if `check_before_start` refuses one."""
    models = (model,) if draft_model is None else (model, draft_model)
    try:
        architectures = [architecture_of(one, read_config(one)) for one in models]
    except ConfigError:
        return _ENGINE
    lean = _LEAN if tp_size > 1 else ("embedded_engine.without_accelerate", *_LEAN)
    return (*lean, *_ENGINE, *dict.fromkeys(map(model_module, architectures)))


def check_is_plain(directory: Path, config: dict[str, Any]) -> None:
    """Raise `ConfigError` if config.json says that the weights are quantised."""
    if config.get("quantization_config") is not None:
        raise ConfigError(f"{directory / 'config.json'}: quantization_config is set; must be a model with plain weights")


def no_weights(directory: Path) -> ConfigError:
    return ConfigError(f"{directory} has neither {WEIGHTS_NAME} nor {INDEX_NAME}; the weights must be safetensors files")


def architecture_of(directory: Path, config: dict[str, Any]) -> str:
    """Return the architecture in config.json.

    Raises:
        ConfigError: It names none, several, or one that the embedded engine does not run.
    """
    named = config.get("architectures")
    if not isinstance(named, list) or len(named) != 1 or not isinstance(named[0], str) or named[0] not in ARCHITECTURES:
        supported = ", ".join(ARCHITECTURES)
        raise ConfigError(f"{directory / 'config.json'}: architectures is {shown(named)}; must name one of {supported}")
    return named[0]


def one_line(error: BaseException, limit: int = 240) -> str:
    """Return an exception of another library as one line of bounded length."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= limit else text[: limit - 3] + "..."
