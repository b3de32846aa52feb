"""Lay out a stored page: for each of the rank's layers of the group, in order, its K and then its V, packed.

Each part is ``[page_size, heads, dim]`` (NHD) or ``[heads, page_size, dim]`` (HND), with the rank's heads in the rank's element
type. So a page of a pool is copied in as many pieces as it has buffers, and a rank with another shard can find every head.
Part of `transfer.storage.keys.STORE_FORMAT`.

Pure.
"""

from __future__ import annotations

from dataclasses import dataclass

from transfer.layer_groups import GroupKind, LayerGroup
from transfer.layout import DType, KVLayout, Shard, TokenOrder


@dataclass(frozen=True, slots=True, kw_only=True)
class PagePart:
    """One layer's K (or MLA latent), or V, in a page.

    Args:
        layer: Index in the whole model.
        shape: ``(page_size, heads, dim)``, or ``(heads, page_size, dim)`` in the order HND.
        offset_bytes: Its beginning in the page.
    """

    layer: int
    is_v: bool
    shape: tuple[int, int, int]
    dtype: DType
    offset_bytes: int

    @property
    def num_bytes(self) -> int:
        return self.shape[0] * self.shape[1] * self.shape[2] * self.dtype.num_bytes


def can_be_stored(group: LayerGroup) -> bool:
    """Return whether the group has pages that prompts can share. A recurrent state has none."""
    return group.kind is not GroupKind.STATE


def page_parts(group: LayerGroup, *, layout: KVLayout, shard: Shard) -> tuple[PagePart, ...]:
    """Return the parts of a page of the group on that rank, in order. Together they have `LayerGroup.page_bytes`.

    Args:
        group: A group that `can_be_stored`.
        shard: Shard of the rank. If its stage has no layer of the group, there are no parts.
    """
    parts: list[PagePart] = []
    offset = 0
    for layer in group.layers_of(layout, shard):
        spec = layout.layers[layer]
        heads = len(shard.heads(spec.num_kv_heads))
        for is_v in (False, True)[: spec.num_buffers]:
            dim = spec.v_head_dim if is_v else spec.k_head_dim
            by_token = shard.order is TokenOrder.NHD
            shape = (shard.page_size, heads, dim) if by_token else (heads, shard.page_size, dim)
            dtype = shard.layer_dtype(layout, layer)
            parts.append(PagePart(layer=layer, is_v=is_v, shape=shape, dtype=dtype, offset_bytes=offset))
            offset += parts[-1].num_bytes
    return tuple(parts)
