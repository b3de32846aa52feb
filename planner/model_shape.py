"""Read a model's sizes from its parsed ``config.json``: the KV of each layer, and the weights.

Pure: it reads no file and uses no library. The embedded engine takes its KV layout from here, so `ModelShape.layout` is exact.
Weights are counted tensor by tensor, too, but an engine may shard them by another rule than `Weights` has.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from fractions import Fraction
from typing import Final, TypeGuard

from planner.config_fields import ConfigFields
from planner.model_families import MODEL_TYPES, READERS
from planner.model_parts import MODEL_DTYPES, ModelShape, Part, VisionSizes, Weights
from transfer.layout import MAX_LAYERS, DType

__all__ = ["ModelShape", "read_model_shape"]

_MXFP4_BITS: Final = Fraction(17, 4)  # 4 bits, and a scale of 8 bits for each 32 weights
_MOST_BITS: Final = 32


def read_model_shape(config: Mapping[str, object], *, source: str = "config.json") -> ModelShape:
    """Read the shape of a model; of a multimodal model, the shape of its language model.

    Args:
        config: The parsed ``config.json``.
        source: Name of the configuration in messages, for example its path.

    Raises:
        ConfigError: The architecture is unknown, or a field is missing or wrong.
    """
    whole = ConfigFields(config, f"{source}: ")
    text = whole.part("text_config")
    model_type = _model_type(whole) if text is None else _model_type_of_text(text)
    fields = whole if text is None else _with_outer(text, whole)
    shape = replace(
        READERS[model_type](fields),
        architecture=_architecture(whole) or next(name for name, known in MODEL_TYPES.items() if known == model_type),
        dtype=_dtype(fields),
        quantised_bits=_quantised_bits(fields),
    )
    vision = _vision(whole, shape.hidden_size)
    if vision is None:
        return shape
    tower = Weights(part=Part.OTHER, unit_params=vision.num_params)
    return replace(shape, vision=vision, first_stage=(*shape.first_stage, tower))


def _architecture(fields: ConfigFields) -> str | None:
    named = fields.values.get("architectures")
    if named is None:
        return None
    if not isinstance(named, list) or len(named) != 1 or not _is_name(named[0]):
        raise fields.wrong("architectures", "a list of one name")
    return named[0]


def _is_name(value: object) -> TypeGuard[str]:
    """Return whether the value can name a class; an outer architecture, which no family has, is printed unchanged."""
    return isinstance(value, str) and value.isascii() and value.isidentifier()


def _model_type(fields: ConfigFields) -> str:
    architecture = _architecture(fields)
    if architecture is None:
        return _model_type_of_text(fields)
    if architecture not in MODEL_TYPES:
        known = ", ".join(MODEL_TYPES)
        raise fields.wrong("architectures", f"one of {known}, or a multimodal model with the text_config of one of them")
    return MODEL_TYPES[architecture]


def _model_type_of_text(fields: ConfigFields) -> str:
    model_type = fields.text("model_type")
    if model_type is None or model_type not in READERS:
        raise fields.wrong("model_type", f"one of {', '.join(READERS)}")
    return model_type


def _with_outer(text: ConfigFields, whole: ConfigFields) -> ConfigFields:
    """Return the language model's fields, and its fields that multimodal configurations keep outside."""
    outer = {
        name: whole.values[name]
        for name in ("dtype", "torch_dtype", "tie_word_embeddings", "quantization_config")
        if name in whole.values
    }
    return ConfigFields({**outer, **text.values}, text.source)


def _dtype(fields: ConfigFields) -> DType | None:
    name = "dtype" if fields.values.get("dtype") is not None else "torch_dtype"
    value = fields.text(name)
    if value is None:
        return None
    if value not in MODEL_DTYPES:
        raise fields.wrong(name, f"one of {', '.join(MODEL_DTYPES)}")
    return MODEL_DTYPES[value]


def _quantised_bits(fields: ConfigFields) -> dict[Part, Fraction]:
    part = fields.part("quantization_config")
    if part is None:
        return {}
    method = part.text("quant_method")
    linears = (Part.ATTENTION, Part.MLP, Part.EXPERTS)
    if method == "fp8":
        return dict.fromkeys(linears, Fraction(8))
    if method == "mxfp4":
        return {Part.EXPERTS: _MXFP4_BITS}
    if method in ("awq", "gptq"):
        return dict.fromkeys(linears, Fraction(part.count("bits", most=_MOST_BITS)))
    raise part.wrong("quant_method", "fp8, mxfp4, awq or gptq")


def _vision(whole: ConfigFields, text_hidden_size: int) -> VisionSizes | None:
    """Estimate the vision tower from its layers and a projection of one matrix; patches and the rest are left out."""
    fields = whole.part("vision_config")
    if fields is None:
        return None
    num_layers = fields.count("num_hidden_layers", absent=24, most=MAX_LAYERS)
    hidden_size = fields.count("hidden_size", absent=1024)
    intermediate_size = fields.count("intermediate_size", absent=4 * hidden_size)
    layer = 4 * hidden_size**2 + 2 * hidden_size * intermediate_size
    num_params = num_layers * layer + hidden_size * text_hidden_size
    return VisionSizes(num_layers=num_layers, hidden_size=hidden_size, num_params=num_params)
