"""KV pages in host memory: a decode rank keeps pages there that have left its device.

Page-major: one page of a group holds all layers of the group on this rank, K then V of each layer, in one contiguous run of
bytes. So a page is one copy over the host link and one write to storage, and a layer's part of it is contiguous too. Owners of
pages are not known here.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from transfer.errors import ConfigError, LayoutError, MemoryPlanError
from transfer.layer_groups import GroupKind
from transfer.pool.kv_pool import KVPool, LayerBuffers, PagedKVPool, PoolView, aligned
from transfer.pool.staging import zeroed_bytes


class HostPool:
    """Pages of the groups of a rank's pool, in host memory; pinned if the pool is on a GPU.

    Args:
        pool: The rank's device pool. The pages have its layout, order and dtype.
        num_pages: Pages of each group, in the order of ``pool.groups``; 0 for a group without pages, always for a group of
            states.

    Attributes:
        page_bytes: Bytes of one page of each group; 0 if the rank's stage has none of its layers.

    Raises:
        ConfigError: A number of pages is missing, too many, negative, or of states; or there is no page at all.
        MemoryPlanError: The host lacks that much memory, or CUDA cannot pin it.
    """

    def __init__(self, pool: KVPool, *, num_pages: Sequence[int]) -> None:
        self.num_pages: tuple[int, ...] = tuple(num_pages)
        self.page_bytes: tuple[int, ...] = tuple(group.page_bytes(pool.layout, pool.shard) for group in pool.groups)
        self._pool = pool
        self._check()
        sizes = [count * size for count, size in zip(self.num_pages, self.page_bytes, strict=True)]
        self._begins = [sum(map(aligned, sizes[:index])) for index in range(len(sizes))]
        self._memory = zeroed_bytes(sum(map(aligned, sizes)))
        self.num_bytes: int = sum(sizes)
        """Bytes of all pages."""
        self._unpin: weakref.finalize[..., HostPool] | None = None
        if pool.device.type == "cuda":
            _pin(self._memory, pool.device)
            # Also for a pool that nobody closes: CUDA refuses to pin addresses again that it believes to be pinned.
            self._unpin = weakref.finalize(self, _unpin, self._memory)
        self._parts: dict[int, PagedKVPool] = {}
        self._device_parts: dict[int, PagedKVPool] = {}

    @property
    def is_pinned(self) -> bool:
        """Whether the device can read and write the memory itself; False after `close`."""
        return self._unpin is not None and self._unpin.alive

    def pages(self, group: int) -> Tensor:
        """Return all pages of a group as bytes in host memory, uint8 [num_pages, page_bytes], shared."""
        begin, count, size = self._begins[group], self.num_pages[group], self.page_bytes[group]
        return self._memory[begin : begin + count * size].view(count, size)

    def page(self, group: int, index: int) -> memoryview:
        """Return the bytes of one page, writable. Raise LayoutError if there is no such page."""
        if not 0 <= index < self.num_pages[group]:
            name, count = self._pool.groups[group].name, self.num_pages[group]
            raise LayoutError(f"page {index} of group {name} is not in the host pool; its pages are in [0, {count})")
        return self.pages(group)[index].numpy().data

    def part(self, group: int) -> PagedKVPool:
        """Return the pages of a group in the shapes of the device pool's part, as CPU tensors over this memory.

        Raise LayoutError if the group has no pages here.
        """
        if group not in self._parts:
            self._parts[group] = self._part_over(group, self.pages(group))
        return self._parts[group]

    def device_part(self, group: int) -> PagedKVPool:
        """Return `part(group)` as the device addresses it: its kernels read and write it over the host link.

        The device must not touch it after `close`. Without a GPU it is `part(group)` itself. Raise LayoutError if the group has
        no pages here.
        """
        if self._pool.device.type != "cuda":
            return self.part(group)
        if group not in self._device_parts:
            with torch.inference_mode(False):  # other callers may write to it outside of inference mode
                self._device_parts[group] = self._part_over(group, _on_device(self.pages(group), self._pool.device))
        return self._device_parts[group]

    def close(self) -> None:
        """Unpin the memory. All copies from and to it must have ended. Idempotent. The memory is freed with its last view."""
        self._device_parts.clear()
        if self._unpin is not None:
            self._unpin()

    def _check(self) -> None:
        groups = self._pool.groups
        if len(self.num_pages) != len(groups):
            names = ", ".join(group.name for group in groups)
            raise ConfigError(f"host num_pages is {self.num_pages}; must be one number for each group of layers ({names})")
        for group, count in zip(groups, self.num_pages, strict=True):
            if count < 0 or (count and group.kind is GroupKind.STATE):
                allowed = "0, for states are not kept in host memory" if group.kind is GroupKind.STATE else "0 (none) or positive"
                raise ConfigError(f"host num_pages of group {group.name} is {count}; must be {allowed}")
        if not sum(count * size for count, size in zip(self.num_pages, self.page_bytes, strict=True)):
            raise ConfigError(f"host num_pages is {self.num_pages}; a host pool has at least 1 page")

    def _part_over(self, group: int, pages: Tensor) -> PagedKVPool:
        """A group's pages [num_pages, page_bytes] as a pool."""
        pool, name = self._pool, self._pool.groups[group].name
        if not pages.numel():
            raise LayoutError(f"group {name} has no pages in the host pool (num_pages is {self.num_pages})")
        layers = pool.groups[group].layers_of(pool.layout, pool.shard)
        position = 0

        def next_view(device_buffer: Tensor) -> Tensor:
            nonlocal position
            begin, shape = position, device_buffer.shape[1:]
            position += shape.numel() * device_buffer.element_size()
            return pages[:, begin:position].view(device_buffer.dtype).view(len(pages), *shape)

        buffers = []
        for layer in layers:
            k = next_view(pool.buffer(layer, is_v=False))
            has_v = pool.layout.layers[layer].num_buffers == 2
            buffers.append(LayerBuffers(k=k, v=next_view(pool.buffer(layer, is_v=True)) if has_v else None))
        return PagedKVPool(layout=pool.layout, shard=pool.shard, num_pages=len(pages), buffers=buffers, layers=layers)


def mixed_pool(pool: KVPool, host: HostPool, group_index: int) -> KVPool:
    """Return a pool whose full attention lies in host pages, and the rest on the device: for prompts too long for the device.

    Its copiers scatter arriving KV straight into host pages, on a GPU by the device's kernels over the host link.

    Args:
        host: Pages over the same layout.
        group_index: The group that lies in host memory: one of full attention, with pages in `host`.

    Raises:
        LayoutError: The group is of another kind, or has no pages in host memory.
    """
    group = pool.groups[group_index]
    if group.kind is not GroupKind.FULL:
        raise LayoutError(f"group {group.name} is of kind {group.kind}; only full attention may lie in host memory")
    part = host.device_part(group_index)
    stage = pool.shard.layers(pool.layout)
    parts = [part if layer in part.layers else pool.part_of(layer) for layer in range(stage.begin, stage.end)]
    buffers = [_buffers_of(own, layer) for layer, own in enumerate(parts, start=stage.begin)]
    counts = [part.num_pages if index == group_index else count for index, count in enumerate(pool.num_pages)]
    return PoolView(layout=pool.layout, shard=pool.shard, buffers=buffers, num_pages=counts)


def _buffers_of(part: PagedKVPool, layer: int) -> LayerBuffers:
    has_v = part.layout.layers[layer].num_buffers == 2
    return LayerBuffers(k=part.buffer(layer, is_v=False), v=part.buffer(layer, is_v=True) if has_v else None)


def _pin(memory: Tensor, device: torch.device) -> None:
    """Pin existing memory: torch rounds its own pinned memory up to powers of two. Raise MemoryPlanError if CUDA cannot."""
    runtime: Any = torch.cuda.cudart()
    with torch.cuda.device(device):
        code = runtime.cudaHostRegister(memory.data_ptr(), memory.numel(), 0)
    if int(code) != 0:
        with contextlib.suppress(RuntimeError):
            torch.ones(1, device=device)  # CUDA reports an error to the next launch too: take it here
        raise MemoryPlanError(
            f"CUDA could not pin the host pool's {memory.numel()} bytes ({runtime.cudaGetErrorString(code)}); a smaller host "
            "pool (offload.host_memory or offload.host_ratio), or more memory that may be locked, would help"
        )


def _unpin(memory: Tensor) -> None:
    torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())


class _DeviceBytes:
    """Pinned host memory, described to torch as an array of the device."""

    def __init__(self, pages: Tensor) -> None:
        self._pages = pages  # keeps the memory for as long as torch keeps this
        self.__cuda_array_interface__ = {
            "shape": tuple(pages.shape),
            "typestr": "|u1",
            "data": (pages.data_ptr(), False),
            "version": 3,
        }


def _on_device(pages: Tensor, device: torch.device) -> Tensor:
    """Return the same bytes as a tensor on the device. Host and device address pinned memory alike (unified addressing).

    Raise LayoutError if they do not.
    """
    if not pages.numel():
        return torch.empty(tuple(pages.shape), dtype=torch.uint8, device=device)
    found: Tensor = torch.as_tensor(_DeviceBytes(pages), device=device)
    if found.data_ptr() != pages.data_ptr():
        raise LayoutError(f"{device} addresses pinned host memory otherwise than the host does; unified addressing is needed")
    return found
