"""Weights generated from config.json alone, to try sizes and speed without the real weights.

Every weight is a function of (seed, name, place in the whole tensor), so that every rank of any TP size has its part of the same
model. The output of such a model is noise, but finite and the same in every run.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

BLOCK_ELEMENTS = 262_139
"""Random numbers drawn per tensor; larger tensors repeat them, because drawing 70 billion takes minutes. It is a prime, so that
the rows of a matrix differ."""


class DummyTensor:
    """One tensor that is generated when it is read, part by part, as transformers reads a safetensors file."""

    def __init__(self, name: str, shape: Sequence[int], seed: int) -> None:
        self._name = name
        self._shape = tuple(shape)
        self._seed = seed

    def get_shape(self) -> list[int]:
        return list(self._shape)

    def __getitem__(self, index: Any) -> Tensor:
        """Return the part at `index` (``...`` or a slice of each dimension), float32, on the CPU.

        A 1-dimensional tensor is a norm's weight (1) or a bias (0). Others are normal, scaled such that a layer's output has the
        size of its input.
        """
        if len(self._shape) < 2:
            return torch.full(self._shape, 1.0 if "norm" in self._name else 0.0)[index]
        slices: tuple[slice, ...] = index if isinstance(index, tuple) else (slice(None),)
        rows = range(self._shape[0])[slices[0]]
        row_elements = math.prod(self._shape[1:])
        whole_rows = self._elements(rows.start * row_elements, len(rows) * row_elements).view(len(rows), *self._shape[1:])
        part = whole_rows[(slice(None), *slices[1:])]
        return part if part.shape == whole_rows.shape else part.clone()  # a view would keep the whole rows alive

    def _elements(self, begin: int, count: int) -> Tensor:
        """Return the elements [begin, begin + count) of the tensor as one row."""
        block, elements, done = self._block(), torch.empty(count), 0
        while done < count:
            offset = (begin + done) % BLOCK_ELEMENTS
            length = min(BLOCK_ELEMENTS - offset, count - done)
            elements[done : done + length] = block[offset : offset + length]
            done += length
        return elements

    def _block(self) -> Tensor:
        digest = hashlib.blake2b(f"{self._seed}/{self._name}".encode(), digest_size=8).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
        return torch.randn(BLOCK_ELEMENTS, generator=generator) * math.sqrt(1 / self._shape[-1])


def dummy_state(model_class: type[PreTrainedModel], config: PretrainedConfig, seed: int) -> dict[str, DummyTensor]:
    """Return all weights of a model by name; none is generated yet."""
    with torch.device("meta"):
        model: Any = model_class(config)
    tied = set(model.all_tied_weights_keys)
    return {name: DummyTensor(name, tensor.shape, seed) for name, tensor in model.state_dict().items() if name not in tied}
