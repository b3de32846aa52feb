"""What gather and scatter do for a caller, and every check that their implementations rely on."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from transfer.errors import LayoutError, LocalProtocolError
from transfer.kv_pool import TORCH_DTYPES, PagedKVPool
from transfer.layout import DType, Span, TokenOrder, WireBuffer


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CopyJob:
    """One checked gather or scatter.

    Args:
        pages: int64 [n] on the pool's device.
        buffers: What to move.
        wire: uint8 [bytes], contiguous, on the pool's device; wire side of `buffers`.
        first_token: The request's token that lies in ``pages[0]`` at offset 0.
    """

    pages: Tensor
    buffers: Sequence[WireBuffer]
    wire: Tensor
    first_token: int

    def slots(self, buffer: WireBuffer) -> Span:
        """The buffer's tokens, counted from the start of the page table."""
        return Span(begin=buffer.tokens.begin - self.first_token, end=buffer.tokens.end - self.first_token)


class HeadSliceCopier(ABC):
    """Moves some heads of one pool between its pages and wire bytes.

    Made once per pool, head slice and wire dtype. Where the dtypes are equal, bits are moved untouched (NaN included); otherwise
    elements are converted as `transfer.kv_pool.convert` does. Holds no state between calls: threads may share one.

    Args:
        pool: Where the pages are.
        heads: Rank-local heads, of every layer that will be named in a call.
        wire_dtype: Element type on the wire.

    Raises:
        LayoutError: No layer of the pool has these heads, or the dtypes cannot be converted into each other.
    """

    def __init__(self, pool: PagedKVPool, *, heads: Span, wire_dtype: DType) -> None:
        if not len(heads):
            raise LayoutError(f"heads [{heads.begin}, {heads.end}) is empty; a copier moves at least one head")
        if pool.element is not wire_dtype and DType.INT8 in (pool.element, wire_dtype):
            raise LayoutError(f"pool is {pool.element}, wire is {wire_dtype}: int8 KV carries no scale here and is only copied")
        self.pool = pool
        self.heads = heads
        self.wire_dtype = wire_dtype
        self._wire_element_bytes = wire_dtype.num_bytes
        self._views: dict[tuple[int, bool], Tensor] = {
            (layer, is_v): self._head_view(layer, is_v=is_v)
            for layer in pool.layers
            if heads.end <= pool.num_heads(layer)
            for is_v in (False, True)[: pool.layout.layers[layer].num_buffers]
        }
        self._row_bytes = {key: view.shape[2] * view.shape[3] * wire_dtype.num_bytes for key, view in self._views.items()}
        if not self._views:
            most = max(pool.num_heads(layer) for layer in pool.layers)
            raise LayoutError(f"heads [{heads.begin}, {heads.end}) leave the pool; its layers have at most {most} on this rank")

    def gather(self, pages: Tensor, buffers: Sequence[WireBuffer], out: Tensor, *, first_token: int = 0) -> None:
        """Copy tokens from their pages into `out`, laid out as `buffers` says.

        On a GPU the copy is queued on the current stream, behind whatever wrote the pool there.

        Args:
            pages: int64 or int32 [n], the request's page table in the order of its tokens; on the pool's device, or on CPU.
                A table on a GPU is not checked, but entries outside the pool are then left out, never followed.
            buffers: From `transfer.layout.wire_buffers`; token ranges may begin and end inside a page.
            out: uint8 [bytes], contiguous, on the pool's device, aligned to the wire dtype; bytes outside of `buffers` stay.
            first_token: The request's token that lies in ``pages[0]`` at offset 0.

        Raises:
            LayoutError: A buffer does not fit this pool, these heads or the wire dtype.
            LocalProtocolError: A tensor is of the wrong kind, too short, or `pages` names pages outside the pool.
        """
        self._gather(self._checked(pages, buffers, out, first_token))

    def scatter(self, pages: Tensor, buffers: Sequence[WireBuffer], source: Tensor, *, first_token: int = 0) -> None:
        """Copy `source` into the pages of its tokens: the reverse of `gather`, same arguments and errors.

        No other slot and no other head of a page is touched. The pages of one table are distinct.
        """
        self._scatter(self._checked(pages, buffers, source, first_token))

    @abstractmethod
    def _gather(self, job: CopyJob) -> None: ...

    @abstractmethod
    def _scatter(self, job: CopyJob) -> None: ...

    def _head_view(self, layer: int, *, is_v: bool) -> Tensor:
        """[num_pages, page_size, heads, dim] of the heads that travel, whatever the pool's order; shared."""
        buffer = self.pool.buffer(layer, is_v=is_v)
        token_major = buffer if self.pool.order is TokenOrder.NHD else buffer.transpose(1, 2)
        return token_major[:, :, self.heads.begin : self.heads.end]

    def _checked(self, pages: Tensor, buffers: Sequence[WireBuffer], wire: Tensor, first_token: int) -> CopyJob:
        pool = self.pool
        if wire.dtype is not torch.uint8 or wire.dim() != 1 or not wire.is_contiguous() or wire.device != pool.device:
            raise LocalProtocolError(
                f"wire tensor is {wire.dtype} {tuple(wire.shape)}, stride {wire.stride()}, on {wire.device}; "
                f"must be contiguous uint8 [bytes] on {pool.device}"
            )
        if wire.data_ptr() % self.wire_dtype.num_bytes:
            raise LocalProtocolError(f"wire tensor at {wire.data_ptr():#x} is not aligned to {self.wire_dtype} elements")
        job = CopyJob(pages=self._checked_pages(pages), buffers=buffers, wire=wire, first_token=first_token)
        end, num_wire_bytes = 0, wire.numel()
        for buffer in buffers:
            self._check_buffer(buffer, first_token=first_token, num_wire_bytes=num_wire_bytes)
            end = max(end, buffer.tokens.end)
        if end - first_token > len(pages) * pool.page_size:
            raise LocalProtocolError(
                f"page table has {len(pages)} pages of {pool.page_size} tokens from token {first_token}; tokens go up to {end}"
            )
        return job

    def _checked_pages(self, pages: Tensor) -> Tensor:
        if pages.dtype not in (torch.int64, torch.int32) or pages.dim() != 1:
            raise LocalProtocolError(f"page table is {pages.dtype} {tuple(pages.shape)}; must be int64 or int32 [n]")
        if pages.device.type == "cpu" and len(pages):
            lowest, highest = (int(edge) for edge in torch.aminmax(pages))
            if lowest < 0 or highest >= self.pool.num_pages:
                raise LocalProtocolError(f"page table has pages {lowest} to {highest}; the pool's are [0, {self.pool.num_pages})")
        elif pages.device not in (torch.device("cpu"), self.pool.device):
            raise LocalProtocolError(f"page table is on {pages.device}; must be on {self.pool.device} or cpu")
        return pages.to(self.pool.device, torch.int64, non_blocking=True).contiguous()

    def _check_buffer(self, buffer: WireBuffer, *, first_token: int, num_wire_bytes: int) -> None:
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
        if buffer.tokens.begin < first_token:
            raise LocalProtocolError(
                f"layer {buffer.layer} begins at token {buffer.tokens.begin}, before first_token {first_token}"
            )
        begin = buffer.offset_bytes
        end = begin + buffer.num_bytes
        if begin < 0 or end > num_wire_bytes or begin % self._wire_element_bytes:
            raise LocalProtocolError(
                f"layer {buffer.layer} lies at wire bytes [{begin}, {end}); must be inside [0, {num_wire_bytes}) "
                f"and on {self.wire_dtype} elements"
            )

    def _view(self, buffer: WireBuffer) -> Tensor:
        """Pool side of a buffer: [num_pages, page_size, heads, dim] in the pool's dtype."""
        return self._views[buffer.layer, buffer.is_v]

    def _wire(self, job: CopyJob, buffer: WireBuffer) -> Tensor:
        """Wire side of a buffer: [tokens, heads, dim] in the wire's dtype."""
        part = job.wire[buffer.offset_bytes : buffer.offset_bytes + buffer.num_bytes]
        return part.view(TORCH_DTYPES[self.wire_dtype]).view(len(buffer.tokens), *self._view(buffer).shape[2:])
