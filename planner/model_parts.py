"""What a model is made of: its layers, the KV that each keeps, and its weights by the pieces in which they are cut.

The values that `planner.model_shape.read_model_shape` makes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from fractions import Fraction
from typing import Final

from transfer.errors import ConfigError
from transfer.layout import DType, KVLayout, LayerSpec, Shard

MODEL_DTYPES: Final = {"float32": DType.FLOAT32, "bfloat16": DType.BFLOAT16, "float16": DType.FLOAT16}
"""What a model may compute in: torch's name for it -> ours."""


class Part(StrEnum):
    """What weights belong to; quantisation goes by it."""

    ATTENTION = "attention"
    MLP = "mlp"
    EXPERTS = "experts"
    OTHER = "other"  # norms, routers, embeddings, head: never quantised


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """`units` equal pieces of `unit_params` weights; tensor parallelism deals out whole pieces.

    The fullest of `n` ranks has ``ceil(units / n)`` of them. Query heads, MLP columns and rows of the head are pieces; so are KV
    heads, of which every rank keeps at least one; what is replicated is a single piece.
    """

    part: Part
    units: int = 1
    unit_params: int

    @property
    def num_params(self) -> int:
        return self.units * self.unit_params

    def num_params_on_rank(self, tp_size: int) -> int:
        return -(-self.units // tp_size) * self.unit_params


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionSizes:
    """The vision tower of a multimodal model."""

    num_layers: int
    hidden_size: int
    num_params: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantisation:
    """How quantised weights are stored: bits of an element, by part of the model; the parts left out are not quantised."""

    bits: Mapping[Part, Fraction]


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerShape:
    """One layer: its KV and its weights."""

    kv: LayerSpec
    weights: tuple[Weights, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """A model, before any cut. Made by `read_model_shape`.

    Args:
        architecture: Name of the model class.
        dtype: What the weights are stored in, as far as they are not quantised; None where the configuration does not say.
        hidden_size: As named.
        num_query_heads: Query heads of an attention layer.
        max_context_tokens: Longest sequence that the model was made for.
        layers: The layers, in order.
        first_stage, last_stage: Weights that only the first and the last pipeline stage have.
        draft: Weights of the layers that predict further tokens (MTP); loaded only for speculative decoding.
        draft_copies: What a checkpoint stores a second time for them: embeddings and head.
        vision, quantisation: None where the model has none.
    """

    architecture: str
    dtype: DType | None
    hidden_size: int
    num_query_heads: int
    max_context_tokens: int
    layers: tuple[LayerShape, ...]
    first_stage: tuple[Weights, ...]
    last_stage: tuple[Weights, ...]
    draft: tuple[Weights, ...] = ()
    draft_copies: tuple[Weights, ...] = ()
    vision: VisionSizes | None = None
    quantisation: Quantisation | None = None

    @property
    def num_params(self) -> int:
        """All weights, draft layers apart. Exact for the language model, an estimate for a vision tower."""
        return sum(weights.num_params for weights in self._all_weights())

    def layout(self, dtype: DType | None = None) -> KVLayout:
        """The model's KV, computed in `dtype` (the stored one where None).

        Raises:
            ConfigError: Neither is known.
        """
        return KVLayout(layers=tuple(layer.kv for layer in self.layers), dtype=self._computed_in(dtype))

    def weights_bytes(
        self,
        *,
        tp_size: int = 1,
        attention_tp_size: int | None = None,
        pp_size: int = 1,
        pp_rank: int = 0,
        dtype: DType | None = None,
        with_draft: bool = False,
    ) -> int:
        """Bytes of the weights on the fullest rank of a pipeline stage.

        Args:
            attention_tp_size: Ranks over which attention is cut, where that is fewer than `tp_size` (dp-attention).
            dtype: What the model computes in; the stored one where None. Quantised weights stay as they are.
            with_draft: Whether draft layers are loaded, which lie on the last stage.
        """
        stage = Shard(pp_size=pp_size, pp_rank=pp_rank).layers(self.layout(dtype))
        held = [weights for layer in self.layers[stage.begin : stage.end] for weights in layer.weights]
        held += self.first_stage if pp_rank == 0 else ()
        if pp_rank == pp_size - 1:
            held += (*self.last_stage, *(self.draft if with_draft else ()))
        params: dict[Part, int] = {}
        for weights in held:
            cut = tp_size if weights.part is not Part.ATTENTION or attention_tp_size is None else attention_tp_size
            params[weights.part] = params.get(weights.part, 0) + weights.num_params_on_rank(cut)
        return self._bytes_of(params, dtype)

    def checkpoint_bytes(self, dtype: DType | None = None) -> int:
        """Bytes of a checkpoint of the whole model, draft layers and all; `dtype` is taken where the stored one is unknown."""
        params: dict[Part, int] = {}
        for weights in (*self._all_weights(), *self.draft, *self.draft_copies):
            params[weights.part] = params.get(weights.part, 0) + weights.num_params
        return self._bytes_of(params, self.dtype or dtype)

    def _all_weights(self) -> Iterable[Weights]:
        yield from self.first_stage
        for layer in self.layers:
            yield from layer.weights
        yield from self.last_stage

    def _bytes_of(self, params: Mapping[Part, int], dtype: DType | None) -> int:
        plain = Fraction(8 * self._computed_in(dtype).num_bytes)
        bits = {} if self.quantisation is None else self.quantisation.bits
        return math.ceil(sum(count * bits.get(part, plain) for part, count in params.items()) / 8)

    def _computed_in(self, dtype: DType | None) -> DType:
        found = dtype or self.dtype
        if found is None:
            raise ConfigError(f"dtype is not in config.json; it must be given, one of {', '.join(MODEL_DTYPES)}")
        return found
