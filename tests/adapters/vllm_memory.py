"""vLLM's KV caches without vLLM: tensors of recorded shapes, and where vLLM's kernels keep each element in them."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvferry.engines.vllm_facts import INDEXER_ROWS, LayerFacts, TableFacts, VllmFacts
from kvferry.engines.vllm_states import StateFacts
from transfer.layout import LayerKind, LayerSpec

ROW_BYTES = {"fp8_ds_mla": 656, "nvfp4_ds_mla": 352}

RECORDED = {path.stem.removeprefix("vllm-0.32-"): path for path in (Path(__file__).parent / "recorded").glob("vllm-0.32-*.json")}


def recorded(case: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(RECORDED[case].read_text(encoding="utf-8"))
    return found


def ranks(record: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [record[name] for name in sorted(record) if name.startswith("rank")]


def facts_of(written: Mapping[str, Any], **changes: Any) -> VllmFacts:
    fields = dict(written)
    fields["stage_layers"] = tuple(fields["stage_layers"])
    fields["layers"] = tuple(LayerFacts(**{**layer, "state": _state_of(layer.get("state"))}) for layer in fields["layers"])
    fields["stage_tables"] = tuple(TableFacts(**table) for table in fields["stage_tables"])
    fields["model_layers"] = tuple(LayerSpec(**{**one, "kind": LayerKind(one["kind"])}) for one in fields["model_layers"])
    return dataclasses.replace(VllmFacts(**fields), **changes)


def sparse_layers(num_layers: int, *, block_size: int, row_format: str = "", begin: int = 0) -> list[LayerFacts]:
    """Caches of a DeepSeek-V3.2 on an NVIDIA GPU: each layer has an indexer and a latent. vLLM registers attention first.

    Source: DeepseekV32IndexerCache in vllm/model_executor/models/deepseek_v2.py; MLAAttention.get_kv_cache_spec (0.32.0).
    """
    latent: dict[str, Any] = {"k_head_dim": 576, "dtype": "bfloat16"}
    if row_format:
        latent = {"k_head_dim": ROW_BYTES[row_format], "dtype": "uint8", "row_format": row_format, "quant_mode": "FP8_PER_TENSOR"}
    common: dict[str, Any] = {"group": 0, "spec": "MLAAttentionSpec", "block_size": block_size, "num_kv_heads": 1}
    indexer = {"k_head_dim": 128, "v_head_dim": 4, "dtype": "uint8", "row_format": INDEXER_ROWS}
    kinds = [("attn", "FLASHMLA_SPARSE", latent), ("indexer.k_cache", "DEEPSEEK_V32_INDEXER", indexer)]
    return [
        LayerFacts(name=f"model.layers.{layer}.self_attn.{name}", backend=backend, **common, **rows)
        for layer in range(begin, begin + num_layers)
        for name, backend, rows in kinds
    ]


def placed_apart(layers: Sequence[LayerFacts], *, num_blocks: int) -> tuple[dict[str, dict[str, Any]], int]:
    """Tensors of layers with rows of different lengths, in the order LBNHC, and the bytes of their allocation."""
    tensors, end = {}, 0
    for layer in layers:
        size, content = getattr(torch, layer.dtype).itemsize, layer.k_head_dim + layer.v_head_dim
        block = layer.block_size * content
        tensors[layer.name] = {
            "dtype": layer.dtype,
            "shape": [num_blocks, 1, layer.block_size, content],
            "stride": [block, content, content, 1],
            "offset": end // size,
        }
        end += num_blocks * block * size
    return tensors, end


def _state_of(written: Mapping[str, Any] | None) -> StateFacts | None:
    if written is None:
        return None
    shapes = tuple(tuple(shape) for shape in written["shapes"])
    return StateFacts(**{**written, "shapes": shapes, "dtypes": tuple(written["dtypes"])})


class Memory:
    """The KV caches of one rank, all of them in one allocation, as vLLM makes them.

    Args:
        tensors: By layer: ``dtype``, ``shape``, ``stride`` and ``offset``, the last two in elements.
        num_bytes: Of the allocation.
    """

    def __init__(self, tensors: Mapping[str, Mapping[str, Any]], num_bytes: int) -> None:
        self.bytes = torch.zeros(num_bytes, dtype=torch.uint8)
        self._tensors = tensors

    @classmethod
    def of(cls, rank: Mapping[str, Any]) -> Memory:
        return cls(rank["tensors"], rank["storage_bytes"])

    def elements(self, name: str) -> Tensor:
        """All of the allocation in a layer's element type."""
        dtype: torch.dtype = getattr(torch, self._tensors[name]["dtype"])
        return self.bytes.view(dtype)

    @property
    def caches(self) -> dict[str, Tensor]:
        """As they are registered."""
        return {
            name: self.elements(name).as_strided(one["shape"], one["stride"], one["offset"])
            for name, one in self._tensors.items()
        }

    def places(self, layer: LayerFacts, blocks: Sequence[int], tokens: range, *, is_v: bool) -> Tensor:
        """Where vLLM keeps some tokens, as indices of `elements`: int64 [tokens, heads, dim].

        Args:
            blocks: The request's block table.
            tokens: Positions in its prompt.
        """
        one = self._tensors[layer.name]
        _, heads, kernel_size, _ = one["shape"]
        of_block, of_head, of_token, _ = one["stride"]
        ratio = layer.block_size // kernel_size  # blocks may be cut for the kernel
        table = torch.tensor([block * ratio + part for block in blocks for part in range(ratio)])
        position = torch.tensor(tokens)
        dim = layer.v_head_dim if is_v else layer.k_head_dim
        token, head, element = position[:, None, None], torch.arange(heads)[None, :, None], torch.arange(dim)[None, None, :]
        begin = one["offset"] + table[token // kernel_size] * of_block + head * of_head
        inside = token % kernel_size
        if layer.backend == "DEEPSEEK_V32_INDEXER":
            # 128 values of each token, and behind all of them a scale of each.
            return begin + (128 * kernel_size + 4 * inside if is_v else 128 * inside) + element
        if layer.backend == "CPU_ATTN":
            # K is [dim, token], and behind all of it V is [token, dim].
            return (
                begin + kernel_size * layer.k_head_dim + inside * dim + element
                if is_v
                else begin + element * kernel_size + inside
            )
        return begin + inside * of_token + element + (layer.k_head_dim if is_v else 0)


def placed(
    layers: Sequence[LayerFacts],
    *,
    order: str,
    num_blocks: int,
    dtype: str,
    kernel_size: int | None = None,
) -> tuple[dict[str, dict[str, Any]], int]:
    """Tensors of a layout by its name: the order, outermost first, of layers, blocks, heads, tokens (N) and content.

    Source: vllm/v1/kv_cache_interface.py, compute_layout_strides and create_kv_cache_views; kv_cache_layout.py (0.32.0, 0.33.0).
    """
    one = layers[0]
    tokens = kernel_size or one.block_size
    ratio = one.block_size // tokens
    sizes = {"L": len(layers), "B": num_blocks * ratio, "H": one.num_kv_heads, "N": tokens, "C": one.k_head_dim + one.v_head_dim}
    strides: dict[str, int] = {}
    step = 1
    for axis in reversed(order):
        strides[axis] = step
        step *= sizes[axis]
    tensors = {
        layer.name: {
            "dtype": dtype,
            "shape": [sizes[axis] for axis in "BHNC"],
            "stride": [strides[axis] for axis in "BHNC"],
            "offset": index * strides["L"],
        }
        for index, layer in enumerate(layers)
    }
    return tensors, step * getattr(torch, dtype).itemsize
