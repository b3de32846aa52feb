"""A model's layers with their KV, and its weights by the pieces in which they are sharded; read by `read_model_shape`."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from fractions import Fraction
from typing import Final

from transfer.errors import ConfigError
from transfer.layout import DType, KVLayout, LayerSpec, Shard

MODEL_DTYPES: Final = {"float32": DType.FLOAT32, "bfloat16": DType.BFLOAT16, "float16": DType.FLOAT16}
"""Dtypes that a model may compute in: torch's name -> ours."""


class Part(StrEnum):
    """Part of a model that weights belong to; quantisation depends on it."""

    ATTENTION = "attention"
    MLP = "mlp"
    EXPERTS = "experts"
    OTHER = "other"  # norms, routers, embeddings, head: never quantised


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """`units` equal pieces of `unit_params` weights; tensor parallelism distributes whole pieces.

    The fullest of `n` ranks has ``ceil(units / n)`` of them. Query heads, MLP columns and rows of the head are pieces, and KV
    heads, of which every rank keeps at least one. Replicated weights are a single piece.
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
class LayerShape:
    """One layer: its KV and its weights."""

    kv: LayerSpec
    weights: tuple[Weights, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """A whole model. Made by `read_model_shape`.

    Args:
        architecture: Name of the model class.
        dtype: Dtype of the stored weights that are not quantised; None if the configuration does not say.
        num_query_heads: Query heads of an attention layer.
        max_context_tokens: Longest sequence that the model was made for.
        first_stage, last_stage: Weights that only the first and the last pipeline stage have.
        draft: Weights of the layers that predict further tokens (MTP); loaded only for speculative decoding.
        draft_copies: Embeddings and head, which a checkpoint stores a second time for the draft layers.
        quantised_bits: Bits of an element, by part of the model; parts that are not quantised are absent.
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
    quantised_bits: Mapping[Part, Fraction] = field(default_factory=dict)

    @property
    def num_params(self) -> int:
        """Number of weights without draft layers; exact for the language model, an estimate for a vision tower."""
        return sum(weights.num_params for weights in self._all_weights())

    def layout(self, dtype: DType | None = None) -> KVLayout:
        """Return the model's KV, computed in `dtype`; None means the stored dtype.

        Raises:
            ConfigError: The dtype is unknown.
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
        """Return the bytes of the weights on the fullest rank of a pipeline stage.

        Args:
            attention_tp_size: Ranks over which attention is sharded, if fewer than `tp_size` (dp-attention).
            dtype: Dtype that the model computes in; None means the stored one. Quantised weights are not converted.
            with_draft: Whether draft layers are loaded, on the last stage.
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
        """Return the bytes of a checkpoint with draft layers; `dtype` is used if the stored one is unknown."""
        params: dict[Part, int] = {}
        for weights in (*self._all_weights(), *self.draft, *self.draft_copies):
            params[weights.part] = params.get(weights.part, 0) + weights.num_params
        return self._bytes_of(params, self.dtype or dtype)

    def with_draft_model(self, draft: ModelShape) -> ModelShape:
        """Return both models as one, whose last layers are those of the draft model. It is computed in this model's dtype."""
        return replace(
            self,
            max_context_tokens=min(self.max_context_tokens, draft.max_context_tokens),
            layers=self.layers + draft.layers,
            first_stage=self.first_stage + draft.first_stage,
            last_stage=self.last_stage + draft.last_stage,
        )

    def _all_weights(self) -> Iterable[Weights]:
        yield from self.first_stage
        for layer in self.layers:
            yield from layer.weights
        yield from self.last_stage

    def _bytes_of(self, params: Mapping[Part, int], dtype: DType | None) -> int:
        plain = Fraction(8 * self._computed_in(dtype).num_bytes)
        return math.ceil(sum(count * self.quantised_bits.get(part, plain) for part, count in params.items()) / 8)

    def _computed_in(self, dtype: DType | None) -> DType:
        found = dtype or self.dtype
        if found is None:
            raise ConfigError(f"dtype is not in config.json; set dtype to one of {', '.join(MODEL_DTYPES)}")
        return found
