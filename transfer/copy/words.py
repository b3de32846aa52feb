"""``kvferry-words-64`` in Triton: see `transfer.copy.digest` for its definition.

A word takes some 16 integer instructions of 32 bits (two additions, three exclusive ors, two products, the sum). The key, an
addition per word, comes from its row and its column.
"""

from __future__ import annotations

import math
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from transfer.copy.copier import WireMemory, check_device_digest
from transfer.copy.digest import FACTOR, STEP, WORD_BYTES
from transfer.copy.launch import Launcher, current_stream

_STEP = tl.constexpr(STEP)
_FACTOR = tl.constexpr(FACTOR)
_PART_TYPES = {8: tl.uint64, 4: tl.uint32, 2: tl.uint16, 1: tl.uint8}
_BLOCK_WORDS = 1024
_NUM_WARPS = 4


@triton.jit
def keys_of(numbers):  # type: ignore[no-untyped-def]  # Triton gives the parameters their types
    """What is added to the words with these numbers (int64), as uint64."""
    return (numbers + 1).to(tl.uint64) * _STEP


@triton.jit
def offsets_of(columns):  # type: ignore[no-untyped-def]
    """How much farther the keys are of words that many places behind (int64), as uint64."""
    return columns.to(tl.uint64) * _STEP


@triton.jit  # type: ignore[untyped-decorator]
def words_of(elements, ROWS: tl.constexpr, COLUMNS: tl.constexpr, WORD_ELEMENTS: tl.constexpr):  # type: ignore[no-untyped-def]
    """[ROWS, COLUMNS] consecutive elements as uint64 words [ROWS, COLUMNS // WORD_ELEMENTS].

    A thread loads 16 bytes of consecutive elements, so most words are put together in the registers of one thread. By way of
    halves of 32 bits: it takes fewer instructions, and ptxas 12.8 crashes on what Triton 3.6 makes of eight shifted bytes.
    """
    if WORD_ELEMENTS == 1:
        words = elements.to(tl.uint64, bitcast=True)
    else:
        BITS: tl.constexpr = 64 // WORD_ELEMENTS
        TYPE: tl.constexpr = tl.uint32 if BITS == 32 else (tl.uint16 if BITS == 16 else tl.uint8)
        parts = elements.to(TYPE, bitcast=True)
        HALF: tl.constexpr = WORD_ELEMENTS // 2  # elements of half a word
        shifts = (tl.arange(0, HALF) * BITS).to(tl.uint32)
        parts = tl.reshape(parts, [ROWS, COLUMNS // WORD_ELEMENTS, 2, HALF]).to(tl.uint32)
        halves = tl.sum(parts << shifts[None, None, None, :], axis=3)  # the parts of a word share no bit
        words = tl.sum(halves.to(tl.uint64) << (tl.arange(0, 2) * 32).to(tl.uint64)[None, None, :], axis=2)
    return words


@triton.jit
def mixed(words, keys):  # type: ignore[no-untyped-def]
    """What words count at their places; all uint64."""
    x = words + keys
    x = (x ^ (x >> 32)) * _FACTOR + keys
    x = (x ^ (x >> 32)) * _FACTOR
    return x ^ (x >> 32)


@triton.jit
def add_to(digest, counts):  # type: ignore[no-untyped-def]
    """Add all of `counts` (uint64, of any shape) to the sum at address `digest`, which others add to as well."""
    total = tl.sum(tl.ravel(counts), axis=0)
    tl.atomic_add(digest.to(tl.pointer_type(tl.int64)), total.to(tl.int64, bitcast=True), sem="relaxed")


@triton.jit(do_not_specialize=["wire", "num_bytes", "digest"])  # type: ignore[untyped-decorator]
def sum_words(  # type: ignore[no-untyped-def]
    wire: tl.int64,
    num_bytes: tl.int64,
    digest: tl.int64,
    PART_TYPE: tl.constexpr,
    PART_BYTES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A block of words: each put together from parts, the largest that the address and the size are multiples of."""
    number = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    base = wire.to(tl.pointer_type(PART_TYPE))
    words = tl.zeros([BLOCK], tl.uint64)
    parts: tl.constexpr = 8 // PART_BYTES
    for part in tl.static_range(parts):
        index = number * parts + part
        found = tl.load(base + index, mask=index * PART_BYTES < num_bytes, other=0)
        words |= found.to(tl.uint64) << (part * PART_BYTES * 8)
    add_to(digest, tl.where(number * 8 < num_bytes, mixed(words, keys_of(number)), 0))


def add_words(digest: Tensor, wire: WireMemory, num_bytes: int) -> None:
    """Add the digest of the first `num_bytes` bytes of a wire to `digest`: a pass over them, queued on the current stream.

    Args:
        digest: int64 [1] on the device whose kernels can read the wire. Raises LayoutError for anything else.
        wire: At any address; slow if it is not on whole words.
    """
    check_device_digest(digest, digest.device)
    if not num_bytes:
        return
    address = wire.data_ptr()
    grid = (triton.cdiv(num_bytes, WORD_BYTES * _BLOCK_WORDS), 1, 1)
    launcher = _launcher(digest.device, math.gcd(WORD_BYTES, address, num_bytes))
    launcher(current_stream(digest.device), grid, (address, num_bytes, digest.data_ptr()))


def is_pass_compiled(device: torch.device, wire_address: int, num_bytes: int) -> bool:
    """Return whether `add_words` on that device would only queue."""
    return _launcher(device, math.gcd(WORD_BYTES, wire_address, num_bytes)).is_compiled


def compile_pass(device: torch.device, wire_address: int, num_bytes: int) -> None:
    """Compile and load the kernel of `add_words` for a wire at that address, without a launch."""
    _launcher(device, math.gcd(WORD_BYTES, wire_address, num_bytes)).compile((wire_address, num_bytes, 0))


@cache
def _launcher(device: torch.device, part_bytes: int) -> Launcher:
    constants = {"PART_TYPE": _PART_TYPES[part_bytes], "PART_BYTES": part_bytes, "BLOCK": _BLOCK_WORDS}
    return Launcher(sum_words, device, constants, num_warps=_NUM_WARPS)
