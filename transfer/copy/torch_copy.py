"""Gather, scatter, digest and moves of pages by plain torch operations, on every device.

This module defines correct results for the other implementations. It also serves GPUs on which Triton cannot compile (setting
`kernels`). On a GPU every call is queued on the current stream, and the host does not wait. A copy launches several operations
for each buffer, and its temporary memory is as large as one buffer.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from transfer.copy.copier import CopyPlan, Digest, HeadSliceCopier, WireMemory, check_device_digest, wire_tensor
from transfer.copy.digest import FACTOR, STEP, WORD_BYTES, HostDigest
from transfer.copy.page_segments import Direction, PagePairs, WorkBefore
from transfer.errors import LayoutError
from transfer.layout import Range, WireBuffer
from transfer.pool.host_pool import HostPool
from transfer.pool.kv_pool import KVPool, as_words, convert

_BLOCK_WORDS: Final = 1 << 21
"""Words that are digested together: their temporary memory is three times 16 MiB, however large the payload is."""


class TorchCopier(HeadSliceCopier):
    """Gather and scatter by indexing. Its plans digest only in host memory; on a GPU `add_words` is one more pass."""

    def plan(self, buffers: Sequence[WireBuffer]) -> CopyPlan:
        return _TorchPlan(self, buffers)


Places = tuple[Tensor, Tensor]
"""Page of each token, and its offset in the page: int64 [tokens] each."""


class _TorchPlan(CopyPlan):
    def _can_digest(self) -> bool:
        return self._pool.device.type == "cpu" and super()._can_digest()

    def gather(self, pages: Tensor, out: WireMemory, *, first_page: int = 0, digest: Digest | None = None) -> None:
        self._check(pages, out, "out", first_page, digest)
        wire, copier = wire_tensor(out), self._copier
        known: dict[Range, Places] = {}
        for buffer in self.buffers:
            page, offset = self._places(pages, first_page, buffer.tokens, known)
            found = as_words(copier.view(buffer))[page, offset].view(self._pool.dtype)
            copier.wire_part(wire, buffer).copy_(convert(found, copier.wire_dtype, scale=copier.scale(buffer)))
        self._add(digest, wire)

    def scatter(self, pages: Tensor, source: WireMemory, *, first_page: int = 0, digest: Digest | None = None) -> None:
        self._check(pages, source, "source", first_page, digest)
        wire, copier = wire_tensor(source), self._copier
        known: dict[Range, Places] = {}
        for buffer in self.buffers:
            page, offset = self._places(pages, first_page, buffer.tokens, known)
            values = convert(copier.wire_part(wire, buffer), self._pool.element, scale=copier.scale(buffer))
            as_words(copier.view(buffer))[page, offset] = as_words(values)
        self._add(digest, wire)

    def _add(self, digest: Digest | None, wire: Tensor) -> None:
        if isinstance(digest, HostDigest):
            digest.update(wire[: self.num_wire_bytes])

    def _places(self, pages: Tensor, first_page: int, tokens: Range, known: dict[Range, Places]) -> Places:
        """Return the places of these tokens. Nearly all buffers of a chunk have the same tokens."""
        found = known.get(tokens)
        if found is None:
            slot = torch.arange(tokens.begin, tokens.end, device=self._pool.device)
            page = pages[first_page + slot // self._pool.page_size]
            found = known[tokens] = (page, slot % self._pool.page_size)
        return found


def add_words(digest: Tensor, wire: WireMemory, num_bytes: int) -> None:
    """Add the digest of the first `num_bytes` bytes of a wire to `digest`.

    Args:
        digest: int64 [1] on the device of the wire.
        wire: uint8 tensor.

    Raises:
        LayoutError: An argument is of another kind, or elsewhere.
    """
    check_device_digest(digest, digest.device)
    if not isinstance(wire, Tensor) or wire.device != digest.device:
        raise LayoutError(f"wire is a {type(wire).__name__}; plain torch digests only a tensor on {digest.device}")
    digest += words_sum(wire[:num_bytes])


def words_sum(payload: Tensor, first_word: int = 0) -> Tensor:
    """Return `transfer.copy.digest.words_sum` of bytes, modulo 2**64, as int64 [] on their device.

    Args:
        payload: uint8 [bytes], contiguous; the last word is filled up with zeros.
        first_word: Number of the first word.
    """
    total = torch.zeros((), dtype=torch.int64, device=payload.device)
    num_words = min(-(-len(payload) // WORD_BYTES), _BLOCK_WORDS)
    first_keys = torch.arange(1, num_words + 1, device=payload.device) * _signed(STEP)
    for begin in range(0, len(payload), WORD_BYTES * _BLOCK_WORDS):
        words = _words(payload[begin : begin + WORD_BYTES * _BLOCK_WORDS])
        keys = first_keys[: len(words)] + _signed((first_word + begin // WORD_BYTES) * STEP)
        mixed = words + keys
        _fold(mixed)
        torch.add(keys, mixed, alpha=_signed(FACTOR), out=mixed)
        _fold(mixed)
        mixed *= _signed(FACTOR)
        _fold(mixed)
        total += mixed.sum()
    return total


def _words(payload: Tensor) -> Tensor:
    """Return int64 [words], padded with zeros and shared where possible."""
    if len(payload) % WORD_BYTES or payload.storage_offset() % WORD_BYTES:
        padded = payload.new_zeros(-(-len(payload) // WORD_BYTES) * WORD_BYTES)
        padded[: len(payload)] = payload
        payload = padded
    return payload.view(torch.int64)


def _fold(words: Tensor) -> None:
    """Replace each word x by x ^ (x >> 32), in place. In little-endian memory the first half of a word is the low one."""
    halves = words.view(torch.int32).view(-1, 2)
    halves[:, 0] ^= halves[:, 1]


def _signed(value: int) -> int:
    """Return the value modulo 2**64 as a number of int64."""
    value %= 1 << 64
    return value - (1 << 64) if value >= 1 << 63 else value


class TorchPageMovement:
    """Moves of whole pages, see `transfer.copy.page_mover.PageMovement`. A GPU reads and writes pinned host memory itself.

    Args:
        buffer_bytes: Most bytes of temporary memory, but at least one layer's part of a page.
    """

    def __init__(self, pool: KVPool, host: HostPool, *, buffer_bytes: int) -> None:
        self._pool = pool
        self._host = host
        self._buffer_bytes = buffer_bytes
        self._stream = torch.cuda.Stream(pool.device) if pool.device.type == "cuda" else None

    def compile(self) -> None:
        """Nothing to do."""

    def move(self, direction: Direction, moves: Sequence[PagePairs], after: WorkBefore | None) -> None:
        if after is not None:
            after.synchronize()
        try:
            with contextlib.nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
                for move in moves:
                    self._move(direction, move)
        finally:
            if self._stream is not None:
                done = torch.cuda.Event(blocking=True)
                done.record(self._stream)
                done.synchronize()

    def _move(self, direction: Direction, move: PagePairs) -> None:
        device = self._pool.device
        source_pages, target_pages = (torch.from_numpy(pages).to(device) for pages in (move.source_pages, move.target_pages))
        layers = self._pool.groups[move.group].layers_of(self._pool.layout, self._pool.shard)
        on_device = self._pool.part_of(layers[0])
        source = self._host.device_part(move.group) if direction is Direction.LOAD else on_device
        target = self._host.device_part(move.group) if direction is Direction.SAVE else on_device
        for layer in layers:
            for is_v in (False, True)[: self._pool.layout.layers[layer].num_buffers]:
                from_pages, to_pages = (as_words(part.buffer(layer, is_v=is_v)) for part in (source, target))
                count = max(1, self._buffer_bytes // (from_pages[0].numel() * from_pages.element_size()))
                for part, onto in zip(source_pages.split(count), target_pages.split(count), strict=True):
                    to_pages[onto] = from_pages[part]
