"""A model's sizes, read off its parsed ``config.json``: what KV each layer keeps, and how many weights a rank holds.

Pure: no file is read and no library is asked. The embedded engine takes its KV layout from here, so `ModelShape.layout` is
exact. The weights are counted tensor by tensor too, but how they are cut is a rule of the engine's: see `Weights`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from fractions import Fraction
from typing import Final, TypeGuard

from planner.config_fields import ConfigFields
from planner.model_families import MODEL_TYPES, READERS
from planner.model_parts import MODEL_DTYPES, ModelShape, Part, Quantisation, VisionSizes, Weights
from transfer.layout import MAX_LAYERS, DType

__all__ = ["ModelShape", "read_model_shape"]

_MXFP4_BITS: Final = Fraction(17, 4)  # 4 bits, and a scale of 8 bits for each 32 of them
_MOST_BITS: Final = 32


def read_model_shape(config: Mapping[str, object], *, source: str = "config.json") -> ModelShape:
    """The shape of the model that a parsed ``config.json`` describes. Of a multimodal model, the language model's.

    Args:
        source: What messages call the configuration, for example its path.

    Raises:
        ConfigError: An architecture that is not known, or a field that is missing or wrong; the message names it, its value and
            what would be right.
    """
    whole = ConfigFields(config, f"{source}: ")
    text = whole.part("text_config")
    model_type = _model_type(whole) if text is None else _model_type_of_text(text)
    fields = whole if text is None else _with_outer(text, whole)
    shape = replace(
        READERS[model_type](fields),
        architecture=_architecture(whole) or next(name for name, known in MODEL_TYPES.items() if known == model_type),
        dtype=_dtype(fields),
        quantisation=_quantisation(fields),
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
    """Whether it can name a class: an outer architecture, which no family knows, is printed as it is."""
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
    if model_type not in READERS:
        raise fields.wrong("model_type", f"one of {', '.join(READERS)}")
    return model_type


def _with_outer(text: ConfigFields, whole: ConfigFields) -> ConfigFields:
    """The language model's fields, and those that multimodal configurations keep on the outside."""
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


def _quantisation(fields: ConfigFields) -> Quantisation | None:
    part = fields.part("quantization_config")
    if part is None:
        return None
    method = part.text("quant_method")
    linears = (Part.ATTENTION, Part.MLP, Part.EXPERTS)
    if method == "fp8":
        return Quantisation(bits=dict.fromkeys(linears, Fraction(8)))
    if method == "mxfp4":
        return Quantisation(bits={Part.EXPERTS: _MXFP4_BITS})
    if method in ("awq", "gptq"):
        return Quantisation(bits=dict.fromkeys(linears, Fraction(part.count("bits", most=_MOST_BITS))))
    raise part.wrong("quant_method", "fp8, mxfp4, awq or gptq")


def _vision(whole: ConfigFields, text_hidden_size: int) -> VisionSizes | None:
    """The vision tower: its layers are counted, patches and what else it has are left out, the projection is a single matrix."""
    fields = whole.part("vision_config")
    if fields is None:
        return None
    num_layers = fields.count("num_hidden_layers", absent=24, most=MAX_LAYERS)
    hidden_size = fields.count("hidden_size", absent=1024)
    intermediate_size = fields.count("intermediate_size", absent=4 * hidden_size)
    layer = 4 * hidden_size**2 + 2 * hidden_size * intermediate_size
    num_params = num_layers * layer + hidden_size * text_hidden_size
    return VisionSizes(num_layers=num_layers, hidden_size=hidden_size, num_params=num_params)
