"""SGLang's KV pools as ours: which tensors of a pool hold which layer, and whether they can be moved.

SGLang hands a transfer backend pointers and lengths. The tensors themselves are read here from its pool object, of which only
attributes are used, so that this file needs no SGLang: a pool is known by the name of its class, and one of another name is
refused, because a subclass may keep its bytes in another way (packed, swizzled, spread over ranks) under the same attributes.
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
"""Element types of a pool that need no scales: SGLang keeps those of 8-bit KV in the model's layers, where they are not read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineCut:
    """What SGLang says of its model and of this rank.

    Args:
        num_layers: Layers of the whole model.
        num_kv_heads: KV heads of the whole model; without effect for MLA.
        tp_size, tp_rank: Of attention: with attention data parallelism these are not SGLang's own tp_size and tp_rank.
        pp_size: Pipeline stages.
        dtype: What the model computes in, by torch's name.
    """

    num_layers: int
    num_kv_heads: int
    tp_size: int
    tp_rank: int
    pp_size: int
    dtype: str


@dataclass(frozen=True, slots=True, kw_only=True)
class EnginePool:
    """A pool of SGLang, as the transfer library takes it."""

    layout: KVLayout
    shard: Shard
    buffers: tuple[LayerBuffers, ...]

    def view(self) -> PoolView:
        """The engine's tensors as a pool of ours; nothing is copied."""
        return PoolView(layout=self.layout, shard=self.shard, buffers=self.buffers)


def read_pool(pool: Any, cut: EngineCut, *, draft_pool: Any = None) -> EnginePool:
    """The layers of SGLang's `pool`, in order.

    Args:
        pool: What the scheduler's allocator calls its KV cache.
        draft_pool: That of speculative decoding's draft model, where there is one.

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
    if cut.pp_size != 1:
        raise LayoutError(f"pp_size is {cut.pp_size}; layers of a pipeline's stages cannot be moved yet, it must be 1")
    if pool.start_layer != 0 or pool.layer_num != cut.num_layers:
        raise LayoutError(
            f"the pool has layers [{pool.start_layer}, {pool.start_layer + pool.layer_num}); "
            f"must be all {cut.num_layers} of the model"
        )
    element = _element(pool)
    is_mla = kind == "MLATokenToKVPool"
    if is_mla:
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
    buffers = tuple(
        LayerBuffers(
            k=_paged(k, shard.page_size, (heads, spec.k_head_dim), f"k of layer {layer}"),
            v=None if v is None else _paged(v, shard.page_size, (heads, spec.v_head_dim), f"v of layer {layer}"),
        )
        for layer, (k, v) in enumerate(pairs)
    )
    return EnginePool(layout=layout, shard=shard, buffers=buffers)


def page_table(pages: Sequence[int], *, start_token: int, page_size: int) -> tuple[int, ...]:
    """A page table of a whole prompt, of the pages that hold it from `start_token` on, which begins a page.

    The pages before that are told as page 0, SGLang's page for padding: nothing before `start_token` is read or written.

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
    """``[slots, heads, elements]`` as ``[pages, page_size, heads, elements]``, the same memory. SGLang has a page more than it
    gives out, and of slots that make no whole page, none is given out either."""
    if tensor.dim() != 3 or tuple(tensor.shape[1:]) != shape:
        raise LayoutError(f"{name} is {tuple(tensor.shape)}; must be [slots, {shape[0]}, {shape[1]}]")
    num_pages = tensor.shape[0] // page_size
    pages: Tensor = tensor[: num_pages * page_size].unflatten(0, (num_pages, page_size))
    return pages
