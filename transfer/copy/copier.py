"""Interfaces of gather and scatter, and every check that their implementations rely on."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from transfer.copy.digest import WORD_BYTES, HostDigest
from transfer.errors import LayoutError, LocalProtocolError
from transfer.layout import DType, Range, TokenOrder, WireBuffer
from transfer.pool.kv_pool import TORCH_DTYPES, PagedKVPool


class WireMemory(Protocol):
    """Memory for wire bytes: a uint8 tensor, or memory with a known address only (a peer's ring)."""

    def data_ptr(self) -> int: ...

    def numel(self) -> int:
        """Bytes."""
        ...


KernelLaunch = tuple[int, int, int, int, int, bytes]
"""Arguments of the driver's launch of a kernel: function, two dimensions of the grid, threads of a program, bytes of shared
memory, and the parameters as the kernel reads them."""

Digest = Tensor | HostDigest
"""Takes the digest of a copy: a `HostDigest` for a pool in host memory, otherwise int64 [1] on the pool's device."""


class CopyPlan(ABC):
    """A gather and a scatter of some buffers, checked and prepared once, for any pages and any wire memory.

    Keep the plan and the arguments of a call until the copy has run: on a GPU a call only queues it.

    Attributes:
        buffers: Buffers that it moves, without the empty ones.
        num_wire_bytes: Bytes of the wire up to the end of the last buffer.
        num_moved_bytes: Bytes of the buffers; less than `num_wire_bytes` if other buffers or gaps lie between them.
        used_pages: Used entries of a page table, counted from the one with the buffers' token 0.
        can_digest: Whether a call can add the digest of the bytes of these buffers. In host memory the buffers must be the wire's
            bytes from its start on, in order and without gaps. On a GPU each must be whole words, and plain torch never can.
    """

    def __init__(self, copier: HeadSliceCopier, buffers: Sequence[WireBuffer]) -> None:
        self._copier = copier
        self._pool = copier.pool
        self.buffers = tuple(buffer for buffer in buffers if len(buffer.tokens))
        for buffer in buffers:
            copier.check_buffer(buffer)
        self.num_wire_bytes = max((one.offset_bytes + one.num_bytes for one in self.buffers), default=0)
        self.num_moved_bytes = sum(buffer.num_bytes for buffer in self.buffers)
        begin = min((one.tokens.begin for one in self.buffers), default=0) // self._pool.page_size
        end = -(-max((one.tokens.end for one in self.buffers), default=0) // self._pool.page_size)
        self.used_pages = Range(begin=begin, end=end)
        self.can_digest = self._can_digest()

    @abstractmethod
    def gather(self, pages: Tensor, out: WireMemory, *, first_page: int = 0, digest: Digest | None = None) -> None:
        """Copy tokens from their pages into `out`, in the order of the buffers. Bytes between and behind them stay.

        On a GPU the copy is queued on the current stream, behind the work that wrote the pool there, and nothing waits for it.

        Args:
            pages: int64 [n], contiguous, on the pool's device: a page table in the order of its tokens. Checked on CPU. On a GPU
                `RequestTables` checks it, and the Triton kernel skips entries outside the pool.
            out: At least `num_wire_bytes` bytes that the pool's device can write, aligned to the wire dtype. A uint8 tensor for a
                pool in host memory.
            first_page: The entry of `pages` whose first token is the buffers' token 0.
            digest: The digest of the moved bytes is added to it, see `can_digest`.

        Raises:
            LayoutError: An argument is of the wrong kind, place or size, or `pages` names pages outside the pool or one twice.
        """

    can_halve: bool = False
    """Whether `gather_half` copies the buffers in two halves: the first `len(buffers) // 2`, and the others."""

    def gather_half(self, half: int, pages: Tensor, out: WireMemory, *, first_page: int, digest: Digest) -> None:
        """Copy one half as `gather` does. Only a plan that `can_halve` has this."""
        raise LocalProtocolError("this plan copies all of its buffers at once")

    reads_wire_once: ClassVar[bool] = False
    """Whether a scatter with a digest loads each byte of the wire once. If not, a peer that can write to the wire can change it
    between the copy and the digest."""

    @abstractmethod
    def scatter(self, pages: Tensor, source: WireMemory, *, first_page: int = 0, digest: Digest | None = None) -> None:
        """Copy `source` into the pages of its tokens: the reverse of `gather`, same arguments and errors.

        No other slot and no other head of a page is touched. The digest is of the bytes of `source`.
        """

    def scatter_kernels(
        self, pages: Tensor, source: WireMemory, *, first_page: int, digest: Tensor
    ) -> Sequence[KernelLaunch] | None:
        """Return the launches of a scatter with digest, without queuing them: two, one per half, if the plan `can_halve`.

        None means that the scatter needs other work, too, or is not compiled.
        """
        return None

    def is_compiled(self, wire_address: int, *, has_digest: bool, is_gather: bool, is_direct: bool = False) -> bool:
        """Return whether a call for a wire at that address only queues work. Only the alignment of the address matters.

        `is_direct` means that the wire is memory with an address only.

        The first calls for a GPU's pool compile kernels, for seconds. The first call of each plan there uploads tables, and
        waits.
        """
        return True

    def compile(  # noqa: B027  # nothing to do on a host
        self, wire_address: int, *, has_digest: bool, is_gather: bool, is_direct: bool = False
    ) -> None:
        """Do the missing work for `is_compiled`, without a copy. Safe on any thread during other copies; idempotent."""

    def _check_digest(self, digest: Digest) -> None:
        """Reject a digest that this plan cannot add to. Overridden on a GPU."""
        if not isinstance(digest, HostDigest):
            raise LayoutError(f"digest is a {type(digest).__name__}; for a pool on {self._pool.device} it must be a HostDigest")

    def _can_digest(self) -> bool:
        """Return `can_digest` of a plan in host memory. Overridden on a GPU."""
        end = 0
        for buffer in self.buffers:
            if buffer.offset_bytes != end:
                return False
            end += buffer.num_bytes
        return True

    def _check(self, pages: Tensor, wire: WireMemory, name: str, first_page: int, digest: Digest | None) -> None:
        """Check everything that a copy relies on; every `gather` and `scatter` calls it first."""
        self._check_wire(wire, name)
        pool = self._pool
        if pages.dtype is not torch.int64 or pages.dim() != 1 or pages.device != pool.device or not pages.is_contiguous():
            raise LayoutError(
                f"pages is {pages.dtype} {tuple(pages.shape)}, stride {pages.stride()}, on {pages.device}; "
                f"must be contiguous int64 [n] on {pool.device}"
            )
        used = self.used_pages
        if not 0 <= first_page <= pages.shape[0] - used.end:
            raise LayoutError(
                f"first_page is {first_page} with {pages.shape[0]} entries in pages; the buffers take {used.end} from it on"
            )
        if pool.device.type == "cpu":
            check_pages(pages[first_page + used.begin : first_page + used.end], pool.num_pages)
        if digest is not None:
            if not self.can_digest:
                raise LayoutError(
                    f"digest needs buffers of whole words of {WORD_BYTES} bytes, in order and without gaps; these have "
                    f"{self.num_moved_bytes} bytes of a wire of {self.num_wire_bytes}; call add_digest over the whole wire"
                )
            self._check_digest(digest)

    def _check_wire(self, wire: WireMemory, name: str) -> None:
        if isinstance(wire, Tensor):
            if wire.dtype is not torch.uint8 or wire.dim() != 1 or not wire.is_contiguous() or wire.device != self._pool.device:
                raise LayoutError(
                    f"{name} is {wire.dtype} {tuple(wire.shape)}, stride {wire.stride()}, on {wire.device}; "
                    f"must be contiguous uint8 [bytes] on {self._pool.device}"
                )
        else:
            self._check_address_only(wire, name)
        if wire.numel() < self.num_wire_bytes:
            raise LayoutError(f"{name} has {wire.numel()} bytes; the buffers take {self.num_wire_bytes}")
        if wire.data_ptr() % self._copier.wire_dtype.num_bytes:
            raise LayoutError(f"{name} begins at {wire.data_ptr():#x}; must be aligned to {self._copier.wire_dtype} elements")

    def _check_address_only(self, wire: WireMemory, name: str) -> None:
        """Check memory that is no tensor. A plan in host memory rejects it."""
        raise LayoutError(f"{name} is a {type(wire).__name__}; for a pool on {self._pool.device} it must be a uint8 tensor there")


class HeadSliceCopier(ABC):
    """Move some heads of one pool between its pages and wire bytes.

    Created once for a pool, head slice and wire dtype. If the dtypes are equal, bits are moved untouched (NaN included).
    Otherwise elements are converted as by `transfer.pool.kv_pool.convert`. Has no state between calls, so threads may share one.

    Args:
        heads: Rank-local heads, of every layer that a call names.
        wire_dtype: Element type on the wire.
        scales: (layer, is_v) -> factor from the narrower to the wider dtype. Used only if the widths differ; missing ones are 1.

    Raises:
        LayoutError: No layer of the pool has these heads, the dtypes cannot be converted into each other, or a scale is not
            between 1e-30 and 1e30.
    """

    def __init__(
        self,
        pool: PagedKVPool,
        *,
        heads: Range,
        wire_dtype: DType,
        scales: Mapping[tuple[int, bool], float] | None = None,
    ) -> None:
        if not len(heads):
            raise LayoutError(f"heads [{heads.begin}, {heads.end}) is empty; a copier moves at least one head")
        if pool.element is not wire_dtype and DType.INT8 in (pool.element, wire_dtype):
            raise LayoutError(f"pool is {pool.element}, wire is {wire_dtype}: int8 KV carries no scale here and is only copied")
        for (layer, is_v), scale in (scales or {}).items():
            if not 1e-30 <= scale <= 1e30:
                raise LayoutError(f"scales[{layer}, {is_v}] is {scale}; must be between 1e-30 and 1e30")
        self.pool = pool
        self.heads = heads
        self.wire_dtype = wire_dtype
        self._scales = dict(scales or {})
        self.views: dict[tuple[int, bool], Tensor] = {
            (layer, is_v): self._head_view(layer, is_v=is_v)
            for layer in pool.layers
            if heads.end <= pool.num_heads(layer)
            for is_v in (False, True)[: pool.layout.layers[layer].num_buffers]
        }
        self._row_bytes = {key: view.shape[2] * view.shape[3] * wire_dtype.num_bytes for key, view in self.views.items()}
        if not self.views:
            most = max(pool.num_heads(layer) for layer in pool.layers)
            raise LayoutError(f"heads [{heads.begin}, {heads.end}) leave the pool; its layers have at most {most} on this rank")

    @abstractmethod
    def plan(self, buffers: Sequence[WireBuffer]) -> CopyPlan:
        """Prepare the copies of some buffers. Raise LayoutError if a buffer does not fit the pool, the heads or the wire dtype.

        Args:
            buffers: From `transfer.layout.wire_buffers`, their tokens counted from the first token of a call's first page. Token
                ranges may begin and end inside a page.
        """

    def check_buffer(self, buffer: WireBuffer) -> None:
        """Raise LayoutError if the buffer does not fit the pool, the heads or the wire dtype."""
        row_bytes = self._row_bytes.get((buffer.layer, buffer.is_v))
        if row_bytes is None:
            raise LayoutError(
                f"layer {buffer.layer} {'V' if buffer.is_v else 'K'}: no such buffer with heads "
                f"[{self.heads.begin}, {self.heads.end}) in the pool of layers {', '.join(map(str, self.pool.layers))}"
            )
        if buffer.row_bytes != row_bytes:
            raise LayoutError(
                f"layer {buffer.layer} has row_bytes {buffer.row_bytes}; {row_bytes} with these heads in {self.wire_dtype}"
            )
        if buffer.offset_bytes < 0 or buffer.offset_bytes % self.wire_dtype.num_bytes:
            raise LayoutError(
                f"layer {buffer.layer} has offset_bytes {buffer.offset_bytes}; must be on {self.wire_dtype} elements, from 0 on"
            )

    def view(self, buffer: WireBuffer) -> Tensor:
        """Return the pool side of a buffer: [num_pages, page_size, heads, dim] in the pool's dtype."""
        return self.views[buffer.layer, buffer.is_v]

    def wire_part(self, wire: Tensor, buffer: WireBuffer) -> Tensor:
        """Return the wire side of a buffer: [tokens, heads, dim] in the wire's dtype."""
        part = wire[buffer.offset_bytes : buffer.offset_bytes + buffer.num_bytes]
        return part.view(TORCH_DTYPES[self.wire_dtype]).view(len(buffer.tokens), *self.view(buffer).shape[2:])

    def scale(self, buffer: WireBuffer) -> float:
        """Return the scale of the buffer; 1 without one."""
        return self._scales.get((buffer.layer, buffer.is_v), 1.0)

    def _head_view(self, layer: int, *, is_v: bool) -> Tensor:
        """Return [num_pages, page_size, heads, dim] of the moved heads, in any order of the pool; shared."""
        buffer = self.pool.buffer(layer, is_v=is_v)
        token_major = buffer if self.pool.order is TokenOrder.NHD else buffer.transpose(1, 2)
        return token_major[:, :, self.heads.begin : self.heads.end]


def wire_tensor(wire: WireMemory) -> Tensor:
    """Return the wire of a plan that takes only tensors, which `_check` has ensured."""
    assert isinstance(wire, Tensor)
    return wire


def check_pages(pages: Tensor, num_pages: int) -> None:
    """Raise LayoutError if pages in host memory are outside the pool or not distinct.

    Args:
        pages: int64 [n] on CPU.
    """
    if not len(pages):
        return
    lowest, highest = (int(edge) for edge in torch.aminmax(pages))
    if lowest < 0 or highest >= num_pages:
        raise LayoutError(f"pages has entries {lowest} to {highest}; the pool's are [0, {num_pages})")
    ordered = pages.sort().values
    if bool((is_repeated := ordered[1:] == ordered[:-1]).any()):
        raise LayoutError(f"pages names page {int(ordered[1:][is_repeated][0])} twice; the pages of one table are distinct")


def check_device_digest(digest: Digest, device: torch.device) -> None:
    """Raise LayoutError if the digest is not an int64 tensor [1] on the device."""
    if not isinstance(digest, Tensor):
        raise LayoutError(f"digest is a {type(digest).__name__}; for a pool on {device} it must be an int64 tensor [1] there")
    if digest.dtype is not torch.int64 or digest.numel() != 1 or digest.device != device:
        raise LayoutError(f"digest is {digest.dtype} {tuple(digest.shape)} on {digest.device}; must be int64 [1] on {device}")
