"""Gather, scatter and moves of pages by plain torch indexing: slow and simple. It defines correct results for the others."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from transfer.copy.copier import CopyPlan, Digest, HeadSliceCopier, WireMemory, wire_tensor
from transfer.copy.digest import FACTOR, STEP, WORD_BYTES, HostDigest
from transfer.copy.page_segments import Direction, PagePairs, WorkBefore
from transfer.layout import WireBuffer
from transfer.pool.host_pool import HostPool
from transfer.pool.kv_pool import KVPool, as_words, convert


class ReferenceCopier(HeadSliceCopier):
    """Works on every device. Tests compare the others with it. Its plans digest only in host memory."""

    def plan(self, buffers: Sequence[WireBuffer]) -> CopyPlan:
        return _ReferencePlan(self, buffers)


class _ReferencePlan(CopyPlan):
    def gather(self, pages: Tensor, out: WireMemory, *, first_page: int = 0, digest: Digest | None = None) -> None:
        self._check(pages, out, "out", first_page, digest)
        wire, copier = wire_tensor(out), self._copier
        for buffer in self.buffers:
            page, offset = self._places(pages, first_page, buffer)
            found = as_words(copier.view(buffer))[page, offset].view(self._pool.dtype)
            copier.wire_part(wire, buffer).copy_(convert(found, copier.wire_dtype, scale=copier.scale(buffer)))
        self._add(digest, wire)

    def scatter(self, pages: Tensor, source: WireMemory, *, first_page: int = 0, digest: Digest | None = None) -> None:
        self._check(pages, source, "source", first_page, digest)
        wire, copier = wire_tensor(source), self._copier
        for buffer in self.buffers:
            page, offset = self._places(pages, first_page, buffer)
            values = convert(copier.wire_part(wire, buffer), self._pool.element, scale=copier.scale(buffer))
            as_words(copier.view(buffer))[page, offset] = as_words(values)
        self._add(digest, wire)

    def _add(self, digest: Digest | None, wire: Tensor) -> None:
        if isinstance(digest, HostDigest):
            digest.update(wire[: self.num_wire_bytes])

    def _places(self, pages: Tensor, first_page: int, buffer: WireBuffer) -> tuple[Tensor, Tensor]:
        """Return page and offset of each token of the buffer, int64 [tokens] each."""
        slot = torch.arange(buffer.tokens.begin, buffer.tokens.end, device=self._pool.device)
        return pages[first_page + slot // self._pool.page_size], slot % self._pool.page_size


def reference_words_sum(payload: Tensor, first_word: int = 0) -> int:
    """`transfer.copy.digest.words_sum` of bytes on any device, in torch.

    Args:
        payload: uint8 [bytes], contiguous; the last word is filled up with zeros.
        first_word: Number of the first word.
    """
    padded = torch.nn.functional.pad(payload, (0, -len(payload) % WORD_BYTES))
    words = padded.view(torch.int64)
    number = torch.arange(first_word + 1, first_word + 1 + len(words), device=payload.device)
    keys = number * _signed(STEP)
    mixed = words + keys
    mixed = (mixed ^ _high_half(mixed)) * _signed(FACTOR) + keys
    mixed = (mixed ^ _high_half(mixed)) * _signed(FACTOR)
    return int((mixed ^ _high_half(mixed)).sum().item()) % (1 << 64)


def _high_half(words: Tensor) -> Tensor:
    return (words >> 32) & 0xFFFFFFFF  # torch's shift copies the sign bit


def _signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value


class ReferencePageMovement:
    """Moves of whole pages, see `transfer.copy.page_mover.PageMovement`."""

    def __init__(self, pool: KVPool, host: HostPool) -> None:
        self._pool = pool
        self._host = host

    def compile(self) -> None:
        """Nothing to do."""

    def move(self, direction: Direction, moves: Sequence[PagePairs], after: WorkBefore | None) -> None:
        if after is not None:
            after.synchronize()
        for move in moves:
            layers = self._pool.groups[move.group].layers_of(self._pool.layout, self._pool.shard)
            on_device = self._pool.part_of(layers[0])
            source = self._host.part(move.group) if direction is Direction.LOAD else on_device
            target = self._host.part(move.group) if direction is Direction.SAVE else on_device
            for layer in layers:
                for is_v in (False, True)[: self._pool.layout.layers[layer].num_buffers]:
                    from_pages, to_pages = (as_words(part.buffer(layer, is_v=is_v)) for part in (source, target))
                    found = from_pages[torch.from_numpy(move.source_pages).to(from_pages.device)]
                    to_pages[torch.from_numpy(move.target_pages).to(to_pages.device)] = found.to(to_pages.device)
