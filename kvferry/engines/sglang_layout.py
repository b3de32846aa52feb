"""Views of SGLang's KV pools: which tensors of a pool hold which layer, and whether they can be moved.

SGLang gives a transfer backend pointers and lengths. This file reads the tensors from the attributes of the pool objects, and
imports nothing of SGLang. It knows a pool by the name of its class. A pool of another class is rejected. A subclass may store its
bytes in another way (packed, swizzled, spread over ranks) under the same attributes.

The layers of a `KVLayout` made here are those of SGLang's pools: the model's layers in their order, then those of a draft model.
A recurrent layer is several of them, one for each part of its state that is sharded by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
from torch import Tensor

from transfer.errors import LayoutError
from transfer.layer_groups import NO_PAGE, GroupKind, LayerGroup, layer_groups
from transfer.layout import DType, KVLayout, LayerKind, LayerSpec, Shard, TokenOrder
from transfer.pool.kv_pool import TORCH_DTYPES, LayerBuffers, PoolView

PLAIN_POOLS: Final = ("MHATokenToKVPool", "MLATokenToKVPool", "DSATokenToKVPool")
MOVABLE_POOLS: Final = (*PLAIN_POOLS, "SWAKVPool", "HybridLinearKVPool")
"""Classes of SGLang that are known. The last two consist of pools of the first two and, for recurrent layers, a `MambaPool`."""

INDEX_SCALE_BYTES: Final = 4
"""Of a token in the indexer of sparse attention (DeepSeek V3.2): one float32 for 128 values of 8 bits."""

MOVABLE_DTYPES: Final = (DType.FLOAT32, DType.BFLOAT16, DType.FLOAT16, DType.FLOAT8_E4M3)

PADDING_PAGE: Final = 0
"""Page of each pool to which SGLang writes values that it discards."""

Scales = tuple[float, float]
MorePages = Mapping[GroupKind, Sequence[int]]
"""Pages of a whole prompt in pools beside that of full attention: the last pages for windows, the slot for states."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineCut:
    """The model, and how SGLang shards it.

    Args:
        num_layers: Layers of the whole model.
        num_kv_heads, window_kv_heads, draft_kv_heads: Heads of the whole model, of its layers with a window, and of the draft
            model; they have no effect for MLA.
        tp_size, tp_rank: Of attention; with attention data parallelism these are not SGLang's own tp_size and tp_rank.
        pp_size, pp_rank: Pipeline stages.
        dtype: Element type in which the model computes, by torch's name.
        window_tokens: Tokens that SGLang keeps of layers with a sliding window (its ``sliding_window_size``).
        scales: Scales of K and V of 8-bit floats by layer of the model; 1.0 for other layers.
    """

    num_layers: int
    num_kv_heads: int
    window_kv_heads: int = 0
    draft_kv_heads: int = 0
    tp_size: int
    tp_rank: int
    pp_size: int = 1
    pp_rank: int = 0
    dtype: str
    window_tokens: int = 0
    scales: Mapping[int, Scales] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StageLayers:
    """The layers of one pipeline stage, as the other stages must know them.

    Args:
        element: Element type of layers that do not have one of their own; None if all have one.
    """

    specs: tuple[LayerSpec, ...]
    element: DType | None
    scales: tuple[Scales, ...]
    num_pages: tuple[int, ...]  # by layer


@dataclass(frozen=True, slots=True, kw_only=True)
class SglangPool:
    """Views of one scheduler's pools.

    Args:
        kv_scales: Scales of K and V for each layer, for 8-bit floats; otherwise empty.
    """

    view: PoolView
    kv_scales: tuple[Scales, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Layer:
    name: str
    spec: LayerSpec
    buffers: LayerBuffers
    scales: Scales = (1.0, 1.0)


def read_pool(
    pool: Any,
    cut: EngineCut,
    *,
    draft_pool: Any = None,
    kinds: Collection[GroupKind] = (),
    gather_stages: Callable[[StageLayers], Sequence[StageLayers]] = lambda own: [own],
) -> SglangPool:
    """Return views of SGLang's pools. Nothing is copied.

    Args:
        pool: KV cache of the scheduler's allocator.
        draft_pool: KV cache of speculative decoding's draft model.
        kinds: Kinds of layers for which SGLang passes pages of their own.
        gather_stages: Returns the layers of every pipeline stage, in order. All stages call it together.

    Raises:
        LayoutError: A layer cannot be moved; the message names it.
    """
    order = _order(pool)
    layers = list(_layers(pool, cut, order))
    if draft_pool is not None:
        layers += _draft_layers(draft_pool, cut, order)
    model_dtype = _dtype(cut.dtype, "the model computes in")
    own = StageLayers(
        specs=tuple(layer.spec for layer in layers),
        element=_element_of(layers),
        scales=tuple(layer.scales for layer in layers),
        num_pages=tuple(len(layer.buffers.k) for layer in layers),
    )
    stages = list(gather_stages(own))
    element = _element_of_stages(stages) or model_dtype
    layout = KVLayout(layers=sum((stage.specs for stage in stages), ()), dtype=model_dtype)
    shard = Shard(
        tp_size=cut.tp_size,
        tp_rank=cut.tp_rank,
        pp_size=cut.pp_size,
        pp_rank=cut.pp_rank,
        page_size=pool.page_size,
        dtype=element,
        order=order,
        stage_layers=tuple(len(stage.specs) for stage in stages) if cut.pp_size > 1 else None,
    )
    groups = tuple(_groups(layout))
    if missing := sorted(set(kinds) - {group.kind for group in groups}):
        raise LayoutError(f"SGLang keeps {missing[0]} pages beside its {type(pool).__name__}, which cannot be moved yet")
    pages = sum((stage.num_pages for stage in stages), ())
    view = PoolView(
        layout=layout,
        shard=shard,
        buffers=[layer.buffers for layer in layers],
        groups=groups,
        num_pages=[pages[group.layers[0]] for group in groups],
    )
    kv_scales = sum((stage.scales for stage in stages), ()) if element is DType.FLOAT8_E4M3 else ()
    return SglangPool(view=view, kv_scales=kv_scales)


def page_tables(
    groups: Sequence[LayerGroup],
    pages: Sequence[int],
    more_pages: MorePages,
    *,
    start_token: int,
    num_tokens: int,
    page_size: int,
) -> tuple[tuple[int, ...], ...]:
    """Return a prompt's page table in each group, from token 0 on.

    Args:
        pages: Pages of full attention, from `start_token` on.
        more_pages: Empty until a token of a window or a state is transferred.
        num_tokens: Of the whole prompt.

    Raises:
        LayoutError: `start_token` does not begin a page, or there are more pages than the prompt has.
    """
    if start_token % page_size:
        raise LayoutError(f"start_token is {start_token}; must be a multiple of the pool's page_size, {page_size}")
    tables: list[tuple[int, ...]] = []
    for group in groups:
        if group.kind is GroupKind.FULL:
            tables.append((*(NO_PAGE,) * (start_token // page_size), *map(int, pages)))
            continue
        last = tuple(map(int, more_pages.get(group.kind, ())))
        num_passed = group.num_pages(num_tokens, page_size) - len(last)
        if num_passed < 0:
            raise LayoutError(f"SGLang has {len(last)} pages of {group.name} for {num_tokens} tokens, in pages of {page_size}")
        tables.append((*(NO_PAGE,) * num_passed, *last) if last else ())
    return tuple(tables)


def page_addresses(pool: Any) -> tuple[list[int], list[int], list[int]]:
    """Return address, bytes, and bytes of a page of each layer of an HND pool, K first: as SGLang does for other pools."""
    tensors: list[Tensor] = [*pool.k_buffer, *pool.v_buffer]
    return [one.data_ptr() for one in tensors], [one.nbytes for one in tensors], [one[0].nbytes for one in tensors]


def _order(pool: Any) -> TokenOrder:
    """Return the order of dimensions in pages, the same in all parts of the pool."""
    parts: list[Any] = [pool, *(getattr(pool, name, None) for name in ("full_kv_pool", "swa_kv_pool"))]
    layouts = {part.kv_cache_layout for part in parts if hasattr(part, "kv_cache_layout")} or {"nhd"}
    if layouts not in ({"nhd"}, {"hnd"}):
        raise LayoutError(f"layer 0 is stored as {' and '.join(sorted(layouts))}, which cannot be moved yet; must be nhd or hnd")
    return TokenOrder(layouts.pop().upper())


def _layers(pool: Any, cut: EngineCut, order: TokenOrder) -> Iterator[_Layer]:
    """Yield the layers of this stage that keep something, in the model's order."""
    kind = type(pool).__name__
    if kind == "SWAKVPool":
        yield from _window_layers(pool, cut, order)
    elif kind == "HybridLinearKVPool":
        yield from _hybrid_layers(pool, cut, order)
    elif kind in PLAIN_POOLS:
        end = pool.start_layer + pool.layer_num
        if cut.pp_size == 1 and (pool.start_layer, end) != (0, cut.num_layers):
            raise LayoutError(f"the pool has layers [{pool.start_layer}, {end}); must be all {cut.num_layers} of the model")
        yield from _plain_layers(pool, cut, order, first=pool.start_layer, num_heads=cut.num_kv_heads)
    else:
        raise LayoutError(
            f"layer 0 is in a pool of class {kind}, which cannot be moved yet; must be one of {', '.join(MOVABLE_POOLS)}"
        )


def _plain_layers(pool: Any, cut: EngineCut, order: TokenOrder, *, first: int, num_heads: int) -> Iterator[_Layer]:
    for index in range(pool.layer_num):
        if type(pool).__name__ == "DSATokenToKVPool":
            yield from _indexer(pool, index, layer=first + index)
        yield _attention(pool, index, cut, order, layer=first + index, num_heads=num_heads)


def _indexer(pool: Any, index: int, *, layer: int) -> Iterator[_Layer]:
    """Yield the indexer of a layer, if it has one: a page has the values of all tokens, then their scales."""
    name, pages = f"indexer of layer {layer}", pool.index_k_with_scale_buffer[index]
    if pool.index_kpool != 1:
        raise LayoutError(f"{name} keeps a value for {pool.index_kpool} tokens, which cannot be moved yet; must be for one")
    if not len(pages):
        return  # it uses that of another layer
    spec = LayerSpec(num_kv_heads=1, k_head_dim=pool.index_head_dim, v_head_dim=INDEX_SCALE_BYTES, dtype=DType.INT8)
    num_values = pool.page_size * spec.k_head_dim
    if pages.dtype.itemsize != 1 or pages.shape[1] != num_values + pool.page_size * INDEX_SCALE_BYTES or torch.version.hip:
        raise LayoutError(f"{name} is {pages.dtype} {tuple(pages.shape)}; only that of NVIDIA GPUs can be moved: a page of bytes")
    values, scales = pages.view(torch.int8).split((num_values, pages.shape[1] - num_values), dim=1)
    shape = (pool.page_size, 1, -1)
    yield _Layer(name=name, spec=spec, buffers=LayerBuffers(k=values.unflatten(1, shape), v=scales.unflatten(1, shape)))


def _window_layers(pool: Any, cut: EngineCut, order: TokenOrder) -> Iterator[_Layer]:
    for layer, (index, is_window) in sorted(pool.layers_mapping.items()):
        if not is_window:
            yield _attention(_kv_pool(pool.full_kv_pool, layer), index, cut, order, layer=layer, num_heads=cut.num_kv_heads)
            continue
        found = _attention(_kv_pool(pool.swa_kv_pool, layer), index, cut, order, layer=layer, num_heads=cut.window_kv_heads)
        if found.spec.kind is not LayerKind.ATTENTION or cut.window_tokens < 1:
            raise LayoutError(f"layer {layer} keeps a window of latents, or of unknown size, which cannot be moved yet")
        yield replace(found, spec=replace(found.spec, kind=LayerKind.SLIDING_WINDOW, window_tokens=cut.window_tokens))


def _hybrid_layers(pool: Any, cut: EngineCut, order: TokenOrder) -> Iterator[_Layer]:
    attention: Mapping[int, int] = pool.full_attention_layer_id_mapping
    kind = type(pool.mamba_pool).__name__
    if kind != "MambaPool":
        raise LayoutError(f"states are in a pool of class {kind}, which cannot be moved yet; must be MambaPool")
    states: dict[int, int] = {layer: index for index, layer in enumerate(pool.mamba_pool.mamba_layer_ids)}
    for layer in sorted({*attention, *states}):
        if layer in attention:
            yield _attention(
                _kv_pool(pool.full_kv_pool, layer), attention[layer], cut, order, layer=layer, num_heads=cut.num_kv_heads
            )
        if layer in states:
            yield from _state(pool.mamba_pool, states[layer], cut, layer=layer)


def _kv_pool(pool: Any, layer: int) -> Any:
    """Return a part of a pool, which holds `layer`."""
    kind = type(pool).__name__
    if kind not in ("MHATokenToKVPool", "MLATokenToKVPool"):
        raise LayoutError(
            f"layer {layer} is in a pool of class {kind}, which cannot be moved yet; must be MHATokenToKVPool or MLATokenToKVPool"
        )
    return pool


def _draft_layers(pool: Any, cut: EngineCut, order: TokenOrder) -> Iterator[_Layer]:
    """Yield the layers of a draft model. SGLang gives them the pages of the model's own full attention."""
    kind = type(pool).__name__
    if kind not in PLAIN_POOLS:
        raise LayoutError(
            f"layer 0 of the draft model is in a pool of class {kind}, which cannot be moved yet; must be one of "
            f"{', '.join(PLAIN_POOLS)}, or SGLang without speculative decoding"
        )
    if (own_order := _order(pool)) is not order:
        raise LayoutError(f"the draft model is stored as {own_order.lower()}, the model as {order.lower()}; must be alike")
    if kind == "MHATokenToKVPool" and not cut.draft_kv_heads:
        raise LayoutError(
            "layer 0 of the draft model has an unknown number of KV heads; must be EAGLE, MTP or a standalone model"
        )
    yield from _plain_layers(pool, cut, order, first=cut.num_layers, num_heads=cut.draft_kv_heads)


def _attention(pool: Any, index: int, cut: EngineCut, order: TokenOrder, *, layer: int, num_heads: int) -> _Layer:
    """Return a layer of K and V, or of latents."""
    kind, name = type(pool).__name__, f"layer {layer}"
    element = _dtype(str(pool.dtype), f"{name} is stored as")
    is_own_dtype = pool.store_dtype is TORCH_DTYPES[element] or element is DType.FLOAT8_E4M3
    if element not in MOVABLE_DTYPES or not is_own_dtype or getattr(pool, "is_quantized_kv_cache", False):
        raise LayoutError(
            f"{name} is stored as {pool.dtype} (in {pool.store_dtype}), which cannot be moved yet; "
            f"must be one of {', '.join(MOVABLE_DTYPES)} without scales of its own"
        )
    if kind in ("MLATokenToKVPool", "DSATokenToKVPool"):
        dim, is_packed = pool.kv_lora_rank + pool.qk_rope_head_dim, pool.dsa_kv_cache_store_fp8
        if is_packed:  # 8-bit floats, their scales and the rotary part in 16 bits
            dim, element = pool.kv_cache_dim, DType.INT8
        spec = LayerSpec(
            kind=LayerKind.MLA, num_kv_heads=1, k_head_dim=dim, v_head_dim=0, dtype=DType.INT8 if is_packed else None
        )
        k, v = pool.kv_buffer[index], None
    else:
        spec = LayerSpec(num_kv_heads=num_heads, k_head_dim=pool.head_dim, v_head_dim=pool.v_head_dim)
        k, v = pool.k_buffer[index], pool.v_buffer[index]
    scales = (cut.scales or {}).get(layer, (1.0, 1.0))
    if v is None and element is DType.FLOAT8_E4M3 and scales != (1.0, 1.0):
        # Triton divides latents by the scale in one of two forms of its attention, and other backends never do.
        raise LayoutError(f"{name} keeps latents in 8-bit floats with scale {scales[0]}, which cannot be moved yet; must be 1.0")
    heads = len(Shard(tp_size=cut.tp_size, tp_rank=cut.tp_rank).heads(spec.num_kv_heads))
    buffers = LayerBuffers(
        k=_paged(k, pool.page_size, heads, spec.k_head_dim, order, element, f"k of {name}"),
        v=None if v is None else _paged(v, pool.page_size, heads, spec.v_head_dim, order, element, f"v of {name}"),
    )
    return _Layer(name=name, spec=spec, buffers=buffers, scales=scales)


def _state(pool: Any, index: int, cut: EngineCut, *, layer: int) -> Iterator[_Layer]:
    """Yield the parts of a recurrent layer's state: the last inputs of each convolution, and the state of the recurrence."""
    cache = pool.mamba_cache
    convolutions = [state for state in cache.conv if state.numel()]
    recurrences = [cache.temporal] if cache.temporal.numel() else []
    num_parts = len(pool.get_contiguous_buf_infos()[0])
    if num_parts != (len(convolutions) + len(recurrences)) * len(pool.mamba_layer_ids):
        raise LayoutError(
            f"layer {layer} keeps more than the states of convolutions and of a recurrence, which cannot be moved yet"
        )
    for state in convolutions:
        yield from _convolution(state[index], pool, cut, layer)
    for state in recurrences:
        name = f"state of layer {layer}"
        yield _part(_joined(state[index], 2, name), cut, name)


def _convolution(state: Tensor, pool: Any, cut: EngineCut, layer: int) -> Iterator[_Layer]:
    """Yield the blocks of a convolution's channels that are sharded by themselves. A channel counts as a head.

    Args:
        state: [slots, channels, inputs]; if SGLang shards another dimension (KDA), [slots, inputs, channels].
    """
    name = f"convolution of layer {layer}"
    blocks = pool.conv_shard_groups
    if blocks is None:
        # SGLang does not report how the channels are sharded, so ranks must have the same ones on both sides.
        yield _part(_joined(state, 1, name).unsqueeze(1), cut, name)
        return
    rows = [state] if pool.conv_slice_axis == 0 else [row.unsqueeze(-1) for row in state.unbind(1)]
    sizes = [block // cut.tp_size for block in blocks]
    if sum(sizes) != rows[0].shape[1] or any(block % cut.tp_size for block in blocks):
        raise LayoutError(f"{name} has {rows[0].shape[1]} channels on each of {cut.tp_size} ranks; the model has {blocks}")
    for row in rows:
        for block in row.split(sizes, dim=1):
            yield _part(block, cut, name)


def _joined(state: Tensor, first_dim: int, name: str) -> Tensor:
    """Join the dimensions from `first_dim` on, without a copy."""
    try:
        return state.view(*state.shape[:first_dim], -1)
    except RuntimeError:
        raise LayoutError(f"{name} has strides {state.stride()}; the elements of a head must be adjacent") from None


def _part(state: Tensor, cut: EngineCut, name: str) -> _Layer:
    """Return a part of a state, [slots, heads, elements]."""
    heads, elements = state.shape[1:]
    spec = LayerSpec(
        kind=LayerKind.RECURRENT_STATE,
        num_kv_heads=heads * cut.tp_size,
        k_head_dim=elements,
        v_head_dim=0,
        dtype=_dtype(str(state.dtype), f"{name} is stored as"),
    )
    return _Layer(name=name, spec=spec, buffers=LayerBuffers(k=state.unsqueeze(1), v=None))


def _element_of(layers: Sequence[_Layer]) -> DType | None:
    """Return the element type of the layers that do not have one of their own; None if all have one."""
    found: dict[Any, _Layer] = {}
    for layer in layers:
        if layer.spec.dtype is None:
            found.setdefault(layer.buffers.k.dtype, layer)
    if len(found) > 1:
        named = ", ".join(f"{layer.name} in {dtype}" for dtype, layer in found.items())
        raise LayoutError(f"layers are stored in {len(found)} element types ({named}); must be one")
    return _dtype(str(next(iter(found))), "the pool is stored as") if found else None


def _element_of_stages(stages: Sequence[StageLayers]) -> DType | None:
    """Return the element type of all stages: one of them may have recurrent layers alone."""
    found = sorted({stage.element for stage in stages if stage.element is not None})
    if len(found) > 1:
        raise LayoutError(f"stages store layers in {len(found)} element types ({', '.join(found)}); must be one")
    return found[0] if found else None


def _groups(layout: KVLayout) -> Iterator[LayerGroup]:
    """Yield the layers of each page table. States of different element types cannot share pages."""
    for group in layer_groups(layout):
        by_dtype: dict[DType | None, list[int]] = {}
        for layer in group.layers:
            by_dtype.setdefault(layout.layers[layer].dtype, []).append(layer)
        for layers in by_dtype.values():
            yield replace(group, layers=tuple(layers))


def _dtype(name: str, of_what: str) -> DType:
    name = name.removeprefix("torch.")
    if name not in set(DType):
        raise LayoutError(f"{of_what} {name}, which cannot be moved; must be one of {', '.join(MOVABLE_DTYPES)}")
    return DType(name)


def _paged(tensor: Tensor, page_size: int, heads: int, dim: int, order: TokenOrder, element: DType, name: str) -> Tensor:
    """View a layer as pages: NHD ``[slots, heads, elements]``, or HND ``[pages, heads, page_size, elements]``.

    SGLang has one page more than it allocates. It never allocates the slots at the end that make no whole page.
    """
    shape = (heads, dim) if order is TokenOrder.NHD else (heads, page_size, dim)
    if tuple(tensor.shape[1:]) != shape:
        first = "slots" if order is TokenOrder.NHD else "pages"
        raise LayoutError(f"{name} is {tuple(tensor.shape)}; must be [{', '.join((first, *map(str, shape)))}]")
    if element.num_bytes == 1:
        tensor = tensor.view(TORCH_DTYPES[element])  # SGLang keeps 8-bit floats as uint8
    if order is TokenOrder.HND:
        return tensor
    num_pages = tensor.shape[0] // page_size
    pages: Tensor = tensor[: num_pages * page_size].unflatten(0, (num_pages, page_size))
    return pages
