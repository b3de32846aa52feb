"""Views of SGLang's KV pools: which tensors of a pool hold which layer, and whether they can be moved.

SGLang gives a transfer backend pointers and lengths. This file reads the tensors from the attributes of the pool object, and
imports nothing of SGLang. It knows a pool by the name of its class. A pool of another class is rejected. A subclass may store its
bytes in another way (packed, swizzled, spread over ranks) under the same attributes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, NoReturn

from torch import Tensor

from transfer.errors import LayoutError
from transfer.layout import DType, KVLayout, LayerKind, LayerSpec, Shard
from transfer.pool.kv_pool import TORCH_DTYPES, LayerBuffers, PoolView

MOVABLE_POOLS: Final = ("MHATokenToKVPool", "MLATokenToKVPool")
"""Classes of SGLang whose tensors are ``[slots, heads, elements]`` for each layer."""

MOVABLE_DTYPES: Final = (DType.FLOAT32, DType.BFLOAT16, DType.FLOAT16)
"""Element types without scales. SGLang stores the scales of 8-bit KV in the model's layers, where they are not read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineCut:
    """The model, and how SGLang shards it.

    Args:
        num_layers, num_kv_heads: Of the whole model; the heads have no effect for MLA.
        tp_size, tp_rank: Of attention; with attention data parallelism these are not SGLang's own tp_size and tp_rank.
        dtype: Element type in which the model computes, by torch's name.
    """

    num_layers: int
    num_kv_heads: int
    tp_size: int
    tp_rank: int
    dtype: str


def read_pool(pool: Any, cut: EngineCut, *, draft_pool: Any = None) -> PoolView:
    """Return a view of SGLang's pool. Nothing is copied.

    Args:
        pool: KV cache of the scheduler's allocator.
        draft_pool: KV cache of speculative decoding's draft model.

    Raises:
        LayoutError: A layer cannot be moved; the message names it.
    """
    kind = type(pool).__name__
    if kind not in MOVABLE_POOLS:
        _refuse(pool, kind)
    if draft_pool is not None:
        raise LayoutError(
            f"layer 0 of the draft model ({type(draft_pool).__name__}) cannot be moved; must be without speculation"
        )
    if pool.start_layer != 0 or pool.layer_num != cut.num_layers:
        raise LayoutError(
            f"the pool has layers [{pool.start_layer}, {pool.start_layer + pool.layer_num}); "
            f"must be all {cut.num_layers} of the model"
        )
    element = _element(pool)
    if kind == "MLATokenToKVPool":
        spec = LayerSpec(kind=LayerKind.MLA, num_kv_heads=1, k_head_dim=pool.kv_lora_rank + pool.qk_rope_head_dim, v_head_dim=0)
        pairs = [(k, None) for k in pool.kv_buffer]
    else:
        if pool.kv_cache_layout != "nhd":
            raise LayoutError(f"layer 0 is stored as {pool.kv_cache_layout}, which cannot be moved yet; must be nhd")
        spec = LayerSpec(num_kv_heads=cut.num_kv_heads, k_head_dim=pool.head_dim, v_head_dim=pool.v_head_dim)
        pairs = list(zip(pool.k_buffer, pool.v_buffer, strict=True))
    layout = KVLayout(layers=(spec,) * cut.num_layers, dtype=_dtype(cut.dtype, "the model computes in"))
    shard = Shard(tp_size=cut.tp_size, tp_rank=cut.tp_rank, page_size=pool.page_size, dtype=element)
    heads = len(shard.heads(spec.num_kv_heads))
    buffers = [
        LayerBuffers(
            k=_paged(k, shard.page_size, (heads, spec.k_head_dim), f"k of layer {layer}"),
            v=None if v is None else _paged(v, shard.page_size, (heads, spec.v_head_dim), f"v of layer {layer}"),
        )
        for layer, (k, v) in enumerate(pairs)
    ]
    return PoolView(layout=layout, shard=shard, buffers=buffers)


def page_table(pages: Sequence[int], *, start_token: int, page_size: int) -> tuple[int, ...]:
    """Return the page table of a whole prompt from the pages that hold it from `start_token` on.

    The entries before it name page 0, SGLang's page for padding. They are neither read nor written.

    Raises:
        LayoutError: `start_token` does not begin a page.
    """
    if start_token % page_size:
        raise LayoutError(f"start_token is {start_token}; must be a multiple of the pool's page_size, {page_size}")
    return (*(0,) * (start_token // page_size), *(int(page) for page in pages))


def _refuse(pool: Any, kind: str) -> NoReturn:
    """Name the first layer that cannot be moved, and why."""
    layers: dict[int, Any] = getattr(pool, "layers_mapping", None) or {}
    windows = sorted(layer for layer, place in layers.items() if place[1])
    if windows:
        raise LayoutError(f"layer {windows[0]} has a sliding window in a pool of its own ({kind}), which cannot be moved yet")
    attention: dict[int, int] | None = getattr(pool, "full_attention_layer_id_mapping", None)
    if attention is not None:
        states = [layer for layer in range(max(attention, default=-1) + 2) if layer not in attention]
        raise LayoutError(f"layer {states[0]} keeps a state and no KV ({kind}), which cannot be moved yet")
    raise LayoutError(
        f"layer 0 is in a pool of class {kind}, which cannot be moved yet; must be one of {', '.join(MOVABLE_POOLS)}"
    )


def _element(pool: Any) -> DType:
    element = _dtype(str(pool.dtype), "layer 0 is stored as")
    if element not in MOVABLE_DTYPES or pool.store_dtype is not TORCH_DTYPES[element]:
        raise LayoutError(
            f"layer 0 is stored as {pool.dtype} (in {pool.store_dtype}), which cannot be moved yet; "
            f"must be one of {', '.join(MOVABLE_DTYPES)}"
        )
    return element


def _dtype(name: str, of_what: str) -> DType:
    name = name.removeprefix("torch.")
    if name not in set(DType):
        raise LayoutError(f"{of_what} {name}, which cannot be moved; must be one of {', '.join(MOVABLE_DTYPES)}")
    return DType(name)


def _paged(tensor: Tensor, page_size: int, shape: tuple[int, int], name: str) -> Tensor:
    """View ``[slots, heads, elements]`` as ``[pages, page_size, heads, elements]``.

    SGLang has one page more than it allocates. It never allocates the slots at the end that make no whole page.
    """
    if tensor.dim() != 3 or tuple(tensor.shape[1:]) != shape:
        raise LayoutError(f"{name} is {tuple(tensor.shape)}; must be [slots, {shape[0]}, {shape[1]}]")
    num_pages = tensor.shape[0] // page_size
    pages: Tensor = tensor[: num_pages * page_size].unflatten(0, (num_pages, page_size))
    return pages
