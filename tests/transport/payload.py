"""Bytes that tests send and memory that they land in, without torch, so that a peer process starts in no time."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from transfer.transport.base import ByteRange
from transfer.transport.shared_memory import shared_memory

Bytes = npt.NDArray[np.uint8]
PATTERN = 0xA5


def rng(begin: int, end: int) -> ByteRange:
    return ByteRange(begin=begin, end=end)


def ring_of(num_bytes: int) -> Bytes:
    """Memory that other processes can map, as a rank's ring is where its transport asks for that, filled with `PATTERN`."""
    ring = np.frombuffer(shared_memory(num_bytes), dtype=np.uint8)
    ring[:] = PATTERN
    return ring


def noise(num_bytes: int, seed: int = 0) -> Bytes:
    return np.random.default_rng(seed).integers(0, 256, num_bytes, dtype=np.uint8)
