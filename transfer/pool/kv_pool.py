"""The KV pool of one rank: one tensor for each layer and K or V, addressed by page or by slot.

A page holds `page_size` tokens, a slot is one token: ``slot = page * page_size + offset``. Layers that share a page table (see
`transfer.layer_groups`) are one `PagedKVPool`. A rank's `KVPool` has one for each group of its model.
`transfer.pool.page_allocator` knows the owners of pages.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from transfer.errors import ConfigError, LayoutError
from transfer.layer_groups import LayerGroup, layer_groups
from transfer.layout import DType, KVLayout, LayerKind, LayerSpec, Shard, TokenOrder
from transfer.pool.staging import zeroed_bytes

BUFFER_ALIGNMENT_BYTES = 256  # widest vector access of a GPU warp, and a multiple of every element size

TORCH_DTYPES = {dtype: getattr(torch, dtype.value) for dtype in DType}
"""torch's dtype for each `DType`."""

_SATURATING = (torch.float16, torch.float8_e4m3fn)  # narrower in range than what is converted to them


def convert(values: Tensor, dtype: DType, *, scale: float = 1.0) -> Tensor:
    """Return `values` as `dtype`, rounded to nearest even: the one conversion of kvferry, wherever a pool's dtype differs.

    Values beyond the largest finite one of float16 (65504) or float8 (448), and infinities, become that one. torch's own cast
    makes them infinities or NaN, which poison every later attention over the page. NaN stays NaN, with unspecified bits.

    Args:
        scale: Factor from the narrower to the wider dtype, see `scale_factor`. No effect if the dtype stays.

    Raises:
        LayoutError: To or from int8, which carries no scale here, or the scale is not usable.
    """
    target = TORCH_DTYPES[dtype]
    if values.dtype is target:
        return values
    if torch.int8 in (values.dtype, target):
        raise LayoutError(f"cannot convert {values.dtype} to {target}: int8 KV carries no scale here and is only copied")
    factor = scale_factor(scale, from_bytes=values.element_size(), to_bytes=dtype.num_bytes)
    if factor != 1.0:
        values = values.float() * factor
    if target in _SATURATING:
        most = torch.finfo(target).max
        return values.float().clamp(-most, most).to(target)
    return values.to(target)


def scale_factor(scale: float, *, from_bytes: int, to_bytes: int) -> float:
    """Return the float32 factor of a conversion: the scale if it widens, its reciprocal if it narrows, otherwise 1.

    The reciprocal is rounded to float32. A division would give other bits, because torch divides by a number in one way on a CPU
    and in another on a GPU. Raise LayoutError if the scale is not between 1e-30 and 1e30: it and its reciprocal must be float32.
    """
    if not 1e-30 <= scale <= 1e30:
        raise LayoutError(f"scale is {scale}; must be between 1e-30 and 1e30")
    if from_bytes == to_bytes:
        return 1.0
    rounded = torch.tensor(scale if to_bytes > from_bytes else 1.0 / scale, dtype=torch.float32)
    return rounded.item()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LayerBuffers:
    """The tensors of one layer; `v` is None where the layer has no V (MLA)."""

    k: Tensor
    v: Tensor | None


class PagedKVPool:
    """K and V of some layers of one rank, in pages that all of these layers share.

    Args:
        shard: This rank's shard. Its order says how a page lies in memory.
        num_pages: Pages of every buffer.
        device: Where the pool is allocated, zeroed. On CPU every page is touched.
        buffers: The layers in order, if an engine's own tensors are the pool. Shapes as of `buffer()`. Pages, tokens and heads
            may be any stride apart, in host memory a head's elements too. `device` then has no effect.
        layers: Layers of the rank, ascending. None means all of them.
        page_size: Tokens per page. None means that of the shard.

    Raises:
        ConfigError: `num_pages` is below 1.
        LayoutError: There are no layers, they cannot share pages, or a given tensor does not fit.
    """

    def __init__(
        self,
        *,
        layout: KVLayout,
        shard: Shard,
        num_pages: int,
        device: torch.device | str = "cpu",
        buffers: Sequence[LayerBuffers] | None = None,
        layers: Sequence[int] | None = None,
        page_size: int | None = None,
    ) -> None:
        if num_pages < 1:
            raise ConfigError(f"num_pages is {num_pages}; a pool has at least 1 page")
        stage = shard.layers(layout)
        self.layers: tuple[int, ...] = tuple(range(stage.begin, stage.end) if layers is None else layers)
        if not self.layers:
            raise LayoutError(f"stage {shard.pp_rank} of {shard.pp_size} has no layers; a pool has at least one")
        if foreign := [layer for layer in self.layers if layer not in stage]:
            raise LayoutError(f"layer {foreign[0]} is not of this rank; it has [{stage.begin}, {stage.end})")
        is_state, self.element = _common_shape(layout, shard, self.layers)
        self.layout = layout
        self.shard = shard
        self.num_pages = num_pages
        self.page_size = 1 if is_state else page_size or shard.page_size
        self.order = TokenOrder.NHD if is_state else shard.order  # of one pseudo token: both orders are the same bytes
        self.dtype: torch.dtype = TORCH_DTYPES[self.element]
        self._places_of_layers = {layer: index for index, layer in enumerate(self.layers)}
        self._buffers = self._allocate(torch.device(device)) if buffers is None else self._adopt(buffers)
        self.device: torch.device = self._buffers[0].k.device
        self.has_adjacent_elements: bool = all(
            tensor.stride(-1) == 1 for pair in self._buffers for tensor in (pair.k, pair.v) if tensor is not None
        )

    @property
    def num_slots(self) -> int:
        """Tokens that fit the pool."""
        return self.num_pages * self.page_size

    @property
    def num_bytes(self) -> int:
        """Bytes of all pages of all layers, without padding."""
        return sum(
            tensor.numel() * tensor.element_size() for pair in self._buffers for tensor in (pair.k, pair.v) if tensor is not None
        )

    def storages(self) -> list[torch.UntypedStorage]:
        """Return the memory of every buffer; often it is one and the same."""
        return [tensor.untyped_storage() for pair in self._buffers for tensor in (pair.k, pair.v) if tensor is not None]

    def num_heads(self, layer: int) -> int:
        """Return the KV heads of this rank in the global layer `layer`."""
        return len(self.shard.heads(self._spec(layer).num_kv_heads))

    def head_dim(self, layer: int, *, is_v: bool) -> int:
        """Return the elements per token and head of K or V; 0 for the V of a layer without V."""
        spec = self._spec(layer)
        return spec.v_head_dim if is_v else spec.k_head_dim

    def buffer(self, layer: int, *, is_v: bool) -> Tensor:
        """Return the pages of one layer, shared and not copied.

        NHD: [num_pages, page_size, heads, dim]; HND: [num_pages, heads, page_size, dim]. `is_v` False means K or the MLA latent.
        Raise LayoutError if the layer is another stage's, or has no V.
        """
        self._spec(layer)
        pair = self._buffers[self._places_of_layers[layer]]
        tensor = pair.v if is_v else pair.k
        if tensor is None:
            raise LayoutError(f"layer {layer} has no V buffer (v_head_dim is 0)")
        return tensor

    def write(self, layer: int, slots: Tensor, k: Tensor, v: Tensor) -> None:
        """Store the KV of some tokens, converted to the pool's dtype.

        Args:
            slots: int64 [T], distinct, in [0, num_slots), on the pool's device.
            k, v: [T, heads, dim] each; dim of v is 0 if the layer has no V.

        Raises:
            LayoutError: A shape does not fit, or a dtype cannot be converted.
            IndexError: A slot is outside the pool (CPU).
        """
        spec, heads = self._spec(layer), self.num_heads(layer)
        for name, values, dim in (("k", k, spec.k_head_dim), ("v", v, spec.v_head_dim)):
            if tuple(values.shape) != (slots.numel(), heads, dim):
                raise LayoutError(
                    f"{name} of layer {layer} has shape {tuple(values.shape)}; must be {(slots.numel(), heads, dim)}"
                )
        self._store(self.buffer(layer, is_v=False), slots, k)
        if spec.v_head_dim:
            self._store(self.buffer(layer, is_v=True), slots, v)

    def read(self, layer: int, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Return the KV of some tokens, in the pool's dtype, as new tensors: K [..., heads, k_dim] and V [..., heads, v_dim].

        v_dim is 0 if the layer has no V. `slots` is int64 [...] of any shape, in [0, num_slots), on the pool's device. Raise
        IndexError if a slot is outside the pool (CPU).
        """
        k = self._load(self.buffer(layer, is_v=False), slots)
        if self._spec(layer).v_head_dim:
            return k, self._load(self.buffer(layer, is_v=True), slots)
        return k, k.new_empty((*slots.shape, self.num_heads(layer), 0))

    def _spec(self, layer: int) -> LayerSpec:
        if layer not in self._places_of_layers:
            raise LayoutError(f"layer {layer} is not in this pool; it has {_shown(self.layers)}")
        return self.layout.layers[layer]

    def _store(self, buffer: Tensor, slots: Tensor, values: Tensor) -> None:
        words, words_of_values = as_words(buffer), as_words(convert(values, self.element).contiguous())
        if self.order is TokenOrder.NHD and buffer.is_contiguous():
            words.view(self.num_slots, *words.shape[2:]).index_copy_(0, slots, words_of_values)
            return
        pages, offsets = self._places(slots)
        if self.order is TokenOrder.NHD:
            words[pages, offsets] = words_of_values
        else:
            words[pages, :, offsets] = words_of_values

    def _load(self, buffer: Tensor, slots: Tensor) -> Tensor:
        words = as_words(buffer)
        if self.order is TokenOrder.NHD and buffer.is_contiguous():
            rows = words.view(self.num_slots, *words.shape[2:])
            return rows.index_select(0, slots.reshape(-1)).view(*slots.shape, *rows.shape[1:]).view(self.dtype)
        flat = slots.reshape(-1)
        pages, offsets = self._places(flat)
        found = words[pages, offsets] if self.order is TokenOrder.NHD else words[pages, :, offsets]
        return found.view(*slots.shape, *found.shape[1:]).view(self.dtype)

    def _places(self, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Return page and offset of each slot. torch refuses too large indices, but takes a negative index from the end."""
        if slots.device.type == "cpu" and slots.numel() and int(slots.min()) < 0:
            raise IndexError(f"slot {int(slots.min())} is out of range; slots are in [0, {self.num_slots})")
        return slots // self.page_size, slots % self.page_size

    def _shape(self, layer: int, *, is_v: bool) -> tuple[int, ...]:
        heads, dim = self.num_heads(layer), self.head_dim(layer, is_v=is_v)
        if self.order is TokenOrder.NHD:
            return (self.num_pages, self.page_size, heads, dim)
        return (self.num_pages, heads, self.page_size, dim)

    def _allocate(self, device: torch.device) -> list[LayerBuffers]:
        shapes = [
            [self._shape(layer, is_v=is_v) for is_v in (False, True)[: self.layout.layers[layer].num_buffers]]
            for layer in self.layers
        ]
        sizes = [[_num_bytes(shape, self.element) for shape in shapes_of_layer] for shapes_of_layer in shapes]
        total = sum(aligned(size) for sizes_of_layer in sizes for size in sizes_of_layer)
        memory = zeroed_bytes(total, device)
        position = 0
        pairs: list[LayerBuffers] = []
        for shapes_of_layer, sizes_of_layer in zip(shapes, sizes, strict=True):
            tensors: list[Tensor] = []
            for shape, size in zip(shapes_of_layer, sizes_of_layer, strict=True):
                tensors.append(memory[position : position + size].view(self.dtype).view(shape))
                position += aligned(size)
            pairs.append(LayerBuffers(k=tensors[0], v=tensors[1] if len(tensors) == 2 else None))
        return pairs

    def _adopt(self, buffers: Sequence[LayerBuffers]) -> list[LayerBuffers]:
        if len(buffers) != len(self.layers):
            raise LayoutError(f"buffers has {len(buffers)} layers; this pool has {len(self.layers)}")
        for layer, pair in zip(self.layers, buffers, strict=True):
            if (pair.v is None) != (self.layout.layers[layer].v_head_dim == 0):
                raise LayoutError(
                    f"buffers of layer {layer}: v is {'absent' if pair.v is None else 'given'}; it does not match the layout"
                )
            for name, tensor in (("k", pair.k), ("v", pair.v)):
                if tensor is None:
                    continue
                shape = self._shape(layer, is_v=name == "v")
                if tuple(tensor.shape) != shape or tensor.dtype is not self.dtype:
                    raise LayoutError(
                        f"{name} of layer {layer} is {tensor.dtype} {tuple(tensor.shape)}; "
                        f"must be {self.dtype} {shape} ({self.order})"
                    )
                if tensor.device != buffers[0].k.device:
                    raise LayoutError(f"{name} of layer {layer} lies on {tensor.device}; must lie on {buffers[0].k.device}")
                if tensor.stride(-1) != 1 and tensor.device.type != "cpu":
                    raise LayoutError(
                        f"{name} of layer {layer} has stride {tensor.stride()} on {tensor.device}: the elements of a head must "
                        "be adjacent there; only in host memory may they be apart"
                    )
        return list(buffers)


class KVPool:
    """All the KV of one rank: a `PagedKVPool` for each group of layers that it has.

    Args:
        layout: The KV of the whole model.
        shard: This rank's shard of it.
        num_pages: Pages of each group, in the order of `layer_groups(layout)`; one number if there is one group. In a group of
            states a page is the state of one request.
        device: Where the pool is allocated, zeroed.

    Raises:
        ConfigError: A number of pages is missing, too many, or below 1.
        LayoutError: The rank has no layers.
    """

    def __init__(
        self, *, layout: KVLayout, shard: Shard, num_pages: int | Sequence[int], device: torch.device | str = "cpu"
    ) -> None:
        groups = layer_groups(layout)
        counts = (num_pages,) if isinstance(num_pages, int) else tuple(num_pages)
        if len(counts) != len(groups):
            raise ConfigError(
                f"num_pages is {counts}; the model has {len(groups)} groups of layers ({', '.join(g.name for g in groups)}): "
                "one number for each"
            )
        # Also of groups that are other stages': the ranks of an instance count alike.
        for group, count in zip(groups, counts, strict=True):
            if count < 1:
                raise ConfigError(f"num_pages of group {group.name} is {count}; a pool has at least 1 page")
        parts = {
            group: PagedKVPool(layout=layout, shard=shard, num_pages=count, device=device, layers=mine)
            for group, count in zip(groups, counts, strict=True)
            if (mine := group.layers_of(layout, shard))
        }
        self._setup(layout, shard, groups, counts, parts)

    def _setup(
        self,
        layout: KVLayout,
        shard: Shard,
        groups: tuple[LayerGroup, ...],
        num_pages: tuple[int, ...],
        parts: Mapping[LayerGroup, PagedKVPool],
    ) -> None:
        if not parts:
            raise LayoutError(f"stage {shard.pp_rank} of {shard.pp_size} has no layers; a pool has at least one")
        self.layout = layout
        self.shard = shard
        self.groups: tuple[LayerGroup, ...] = groups
        self.num_pages = num_pages
        self.page_size = shard.page_size
        self.order = shard.order
        self._parts = dict(parts)
        self._part_of = {layer: part for part in parts.values() for layer in part.layers}
        self._group_of = {layer: index for index, group in enumerate(self.groups) for layer in group.layers}
        self.device: torch.device = next(iter(parts.values())).device

    @property
    def parts(self) -> tuple[PagedKVPool, ...]:
        """The groups of which this rank has layers, in the order of `groups`."""
        return tuple(self._parts.values())

    @property
    def num_bytes(self) -> int:
        """Bytes of all pages of all layers, without padding."""
        return sum(part.num_bytes for part in self.parts)

    @property
    def storage_bytes(self) -> dict[str, int]:
        """Bytes of the memory that each group's tensors lie in, by its name. Includes padding and everything else in it."""
        return {
            group.name: sum({storage.data_ptr(): storage.nbytes() for storage in part.storages()}.values())
            for group, part in self._parts.items()
        }

    def group_of(self, layer: int) -> int:
        """Return the index in `groups`, and in a request's page tables, of the global layer `layer`."""
        self.part_of(layer)
        return self._group_of[layer]

    def part_of(self, layer: int) -> PagedKVPool:
        """Return the pages that hold the global layer `layer`. Raise LayoutError if the layer is another stage's."""
        part = self._part_of.get(layer)
        if part is None:
            raise LayoutError(f"layer {layer} is not of this rank; it has {_shown(tuple(sorted(self._part_of)))}")
        return part

    def num_heads(self, layer: int) -> int:
        """Return the KV heads of this rank in the global layer `layer`."""
        return self.part_of(layer).num_heads(layer)

    def buffer(self, layer: int, *, is_v: bool) -> Tensor:
        """Return the pages of one layer, see `PagedKVPool.buffer`."""
        return self.part_of(layer).buffer(layer, is_v=is_v)

    def write(self, layer: int, slots: Tensor, k: Tensor, v: Tensor) -> None:
        """Store the KV of some tokens at slots of the layer's own group, see `PagedKVPool.write`."""
        self.part_of(layer).write(layer, slots, k, v)

    def read(self, layer: int, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Return the KV at slots of the layer's own group, see `PagedKVPool.read`."""
        return self.part_of(layer).read(layer, slots)


class PoolView(KVPool):
    """A `KVPool` over tensors that an engine owns: nothing is allocated or copied.

    Args:
        shard: This rank's shard. Its order and dtype are those of the tensors.
        buffers: The rank's layers in order, each ``[num_pages, page_size, heads, dim]`` (HND: ``[num_pages, heads, page_size,
            dim]``; a recurrent layer: ``[requests, 1, heads, elements]``), with pages, tokens and heads any stride apart, in host
            memory a head's elements too. The layers of a group have equally many pages.
        num_pages: Pages of each group. The nodes need it if this rank's stage has no layer of a group, because the ranks of an
            instance count alike. None means the pages of the tensors, and 0 for such a group.
        groups: Groups of the engine, whose page tables it has. An engine may divide a group of `layer_groups(layout)` into
            several. None means `layer_groups(layout)`.
        page_sizes: Tokens per page of each group. None means that of the shard.

    Raises:
        LayoutError: A tensor does not fit the layout and the shard, or `num_pages` does not fit the tensors.
    """

    def __init__(
        self,
        *,
        layout: KVLayout,
        shard: Shard,
        buffers: Sequence[LayerBuffers],
        num_pages: Sequence[int] | None = None,
        groups: tuple[LayerGroup, ...] | None = None,
        page_sizes: Sequence[int] | None = None,
    ) -> None:
        stage, groups = shard.layers(layout), layer_groups(layout) if groups is None else groups
        if len(buffers) != len(stage):
            raise LayoutError(f"buffers has {len(buffers)} layers; this rank has {len(stage)}")
        if num_pages is not None and len(num_pages) != len(groups):
            raise LayoutError(
                f"num_pages is {tuple(num_pages)}; the model has {len(groups)} groups of layers: one number for each"
            )
        counts = [0] * len(groups) if num_pages is None else list(num_pages)
        parts: dict[LayerGroup, PagedKVPool] = {}
        for index, group in enumerate(groups):
            mine = group.layers_of(layout, shard)
            if not mine:
                continue
            pairs = [buffers[layer - stage.begin] for layer in mine]
            first = pairs[0].k
            if first.dim() != 4 or not len(first):
                raise LayoutError(f"k of layer {mine[0]} is {tuple(first.shape)}; must have 4 dimensions, and at least 1 page")
            if num_pages is not None and counts[index] != len(first):
                raise LayoutError(
                    f"num_pages of group {group.name} is {counts[index]}; k of layer {mine[0]} has {len(first)} pages"
                )
            counts[index] = len(first)
            page_size = None if page_sizes is None else page_sizes[index]
            parts[group] = PagedKVPool(
                layout=layout, shard=shard, num_pages=len(first), buffers=pairs, layers=mine, page_size=page_size
            )
        devices = {part.device for part in parts.values()}
        if len(devices) > 1:
            raise LayoutError(f"buffers lie on {', '.join(sorted(map(str, devices)))}; must all lie on one device")
        self._setup(layout, shard, groups, tuple(counts), parts)


def _common_shape(layout: KVLayout, shard: Shard, layers: Sequence[int]) -> tuple[bool, DType]:
    """Return whether the layers keep states, and their element type. Raise LayoutError if they differ: such layers cannot share
    pages."""
    found: dict[tuple[bool, DType], int] = {}
    for layer in layers:
        shape = (layout.layers[layer].kind is LayerKind.RECURRENT_STATE, shard.layer_dtype(layout, layer))
        found.setdefault(shape, layer)
    if len(found) > 1:
        first, second = list(found.values())[:2]
        raise LayoutError(
            f"layers {first} and {second} are {layout.layers[first].kind} and {layout.layers[second].kind} in "
            f"{shard.layer_dtype(layout, first)} and {shard.layer_dtype(layout, second)}; they cannot share pages"
        )
    return next(iter(found))


def _shown(layers: tuple[int, ...]) -> str:
    is_run = layers == tuple(range(layers[0], layers[-1] + 1))
    return f"[{layers[0]}, {layers[-1] + 1})" if is_run else ", ".join(map(str, layers))


def as_words(tensor: Tensor) -> Tensor:
    """Return the same memory as integers of the same size: torch cannot index every 8-bit float, and bits must not change."""
    return tensor.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[tensor.element_size()])


def _num_bytes(shape: Sequence[int], dtype: DType) -> int:
    count = dtype.num_bytes
    for length in shape:
        count *= length
    return count


def aligned(num_bytes: int) -> int:
    """Return `num_bytes` rounded up to a multiple of `BUFFER_ALIGNMENT_BYTES`."""
    return -(-num_bytes // BUFFER_ALIGNMENT_BYTES) * BUFFER_ALIGNMENT_BYTES
