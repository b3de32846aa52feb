"""Staging memory: the contiguous bytes that gather fills and the transport sends, or that it fills and scatter reads."""

from __future__ import annotations

import contextlib
import mmap
from dataclasses import dataclass
from enum import Enum
from typing import Final, Literal

import torch
from torch import Tensor

from transfer.errors import ChunkTooLarge, ConfigError, LocalProtocolError, MemoryPlanError

ALIGNMENT_BYTES = 4096
"""Of a buffer and of each slot: a page of host memory, what registration and zero-copy sends work in."""


class NotYet(Enum):
    """The type of `NOT_YET`."""

    NOT_YET = "not yet"


NOT_YET: Final[Literal[NotYet.NOT_YET]] = NotYet.NOT_YET
"""Every slot is taken: ask again after a release."""


def zeroed_bytes(num_bytes: int, device: torch.device | str = "cpu") -> Tensor:
    """Zeroed uint8 [num_bytes], on a multiple of `ALIGNMENT_BYTES`.

    On CPU every page is touched, so that no first transfer pays for page faults, and huge pages are asked for where the system
    grants them (fewer TLB misses when pages are copied in no order).

    Raises:
        MemoryPlanError: The system has not that much address space left (CPU).
    """
    if torch.device(device).type != "cpu":
        memory = torch.zeros(num_bytes + ALIGNMENT_BYTES, dtype=torch.uint8, device=device)
        start = -memory.data_ptr() % ALIGNMENT_BYTES
        return memory[start : start + num_bytes]
    # Private and anonymous: zero, page-aligned, given back with the last tensor that views it.
    try:
        region = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryPlanError(f"the system refused {num_bytes} bytes of host memory: {error}") from error
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # advice only: kernels built without transparent huge pages refuse it
            region.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(region, dtype=torch.uint8).zero_()


class StagingBuffer:
    """Registered-once device memory.

    Args:
        num_bytes: Size.
        device: Where it lies.

    Raises:
        ConfigError: `num_bytes` is below 1.
    """

    def __init__(self, num_bytes: int, *, device: torch.device | str = "cpu") -> None:
        if num_bytes < 1:
            raise ConfigError(f"staging num_bytes is {num_bytes}; it must be at least 1")
        self.tensor: Tensor = zeroed_bytes(num_bytes, device)
        """uint8 [num_bytes]; also what `Transport.register` takes."""

    @property
    def num_bytes(self) -> int:
        return self.tensor.numel()

    @property
    def device(self) -> torch.device:
        return self.tensor.device

    def part(self, begin: int, end: int) -> Tensor:
        """Bytes [begin, end), shared.

        Raises:
            LocalProtocolError: The range leaves the buffer.
        """
        if not 0 <= begin <= end <= self.num_bytes:
            raise LocalProtocolError(f"staging range [{begin}, {end}) leaves the buffer of {self.num_bytes} bytes")
        return self.tensor[begin:end]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StagingSlot:
    """One slot, from acquire to release.

    Args:
        index: Which one.
        begin: Its first byte in the buffer.
        tensor: uint8 [slot_bytes], its memory.
    """

    index: int
    begin: int
    tensor: Tensor

    def payload(self, num_bytes: int) -> Tensor:
        """The slot's first `num_bytes`, shared.

        Raises:
            ChunkTooLarge: The slot is smaller.
        """
        if num_bytes > self.tensor.numel():
            raise ChunkTooLarge(f"chunk of {num_bytes} bytes does not fit a staging slot of {self.tensor.numel()} bytes")
        return self.tensor[:num_bytes]


class StagingSlots:
    """A staging buffer cut into equal slots, given out one chunk at a time.

    Invariant, executed by `check_invariants()`: every slot is free or held, never both. Not thread-safe: it has one owner.

    Args:
        buffer: The memory; at least `required_bytes(num_slots, slot_bytes)`.
        num_slots: How many; two let gather and write overlap.
        slot_bytes: Largest payload of a slot.

    Raises:
        ConfigError: A number is below 1, or the buffer is too small.
    """

    def __init__(self, buffer: StagingBuffer, *, num_slots: int, slot_bytes: int) -> None:
        required = self.required_bytes(num_slots, slot_bytes)
        if buffer.num_bytes < required:
            raise ConfigError(f"staging of {buffer.num_bytes} bytes is too small: {num_slots} x {slot_bytes} take {required}")
        self.buffer = buffer
        self.num_slots = num_slots
        self.slot_bytes = slot_bytes
        # Last in, first out: the slot used last is the one still in the cache.
        self._free = list(range(num_slots - 1, -1, -1))
        self._held: dict[int, StagingSlot] = {}

    @staticmethod
    def required_bytes(num_slots: int, slot_bytes: int) -> int:
        """Bytes of a buffer that holds these slots, each on a multiple of `ALIGNMENT_BYTES`.

        Raises:
            ConfigError: A number is below 1.
        """
        if num_slots < 1 or slot_bytes < 1:
            raise ConfigError(f"num_slots is {num_slots}, slot_bytes is {slot_bytes}; both must be at least 1")
        return num_slots * _stride(slot_bytes)

    @property
    def num_free(self) -> int:
        return len(self._free)

    def acquire(self) -> StagingSlot | Literal[NotYet.NOT_YET]:
        """A free slot, or `NOT_YET` while every slot is held."""
        if not self._free:
            return NOT_YET
        index = self._free.pop()
        begin = index * _stride(self.slot_bytes)
        slot = StagingSlot(index=index, begin=begin, tensor=self.buffer.part(begin, begin + self.slot_bytes))
        self._held[index] = slot
        return slot

    def release(self, slot: StagingSlot) -> None:
        """Give a slot back; its bytes may be overwritten from now on.

        Raises:
            LocalProtocolError: It was released before, or is not of these slots.
        """
        if self._held.get(slot.index) is not slot:
            raise LocalProtocolError(f"staging slot {slot.index} is not held: released twice, or of another buffer")
        del self._held[slot.index]
        self._free.append(slot.index)

    def check_invariants(self) -> None:
        """Execute the class's invariant.

        Raises:
            LocalProtocolError: A slot is lost or both free and held.
        """
        if sorted([*self._free, *self._held]) != list(range(self.num_slots)):
            raise LocalProtocolError(f"staging slots free {sorted(self._free)}, held {sorted(self._held)}, of {self.num_slots}")


def _stride(slot_bytes: int) -> int:
    return -(-slot_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
