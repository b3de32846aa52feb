"""The digest of a grant's payload: what the writer announces and the reader checks.

Two algorithms, negotiated per pair of instances. ``xxh3-64`` is the fastest on a CPU, but sequential. ``kvferry-words-64`` is for
kernels, whose programs see the payload in no order: a sum of one number for each 64-bit word and its place.

Words: the payload as little-endian 64-bit words, the last one filled up with zeros. Word number i, with the key
``(i + 1) * STEP``, counts as this, in integers modulo 2**64, and the digest is the sum of what all words count::

    x = word + key
    x = (x ^ (x >> 32)) * FACTOR + key
    x = (x ^ (x >> 32)) * FACTOR
    x = x ^ (x >> 32)

Each step is a bijection of the word: no change inside one word goes unseen. The shifts carry high bits down and the products low
bits up. Equal words in other places, swapped or moved ones, count differently; the key comes twice so that this is true of words
that differ by what keys differ by, too. The shifts are by 32 because a GPU has 32-bit registers: such a shift is free, and so is
the second key, added by the multiplication's own instruction.

Source: but for the keys it is D. Degski's 64-bit hash, which has the structure of MurmurHash3's finaliser; STEP is 2**64 divided
by the golden ratio, made odd (Knuth, vol. 3, 6.4).
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from transfer.errors import ConfigError, LocalProtocolError

DIGEST_XXH3 = "xxh3-64"
"""The algorithm for payload in host memory."""

DIGEST_WORDS = "kvferry-words-64"
"""The algorithm that the GPU's gather and scatter compute on their way."""

STEP = 0x9E3779B97F4A7C15
FACTOR = 0xD6E8FEB86659FD93
WORD_BYTES = 8

_BLOCK_WORDS = 1 << 13  # what NumPy's passes go over stays in the cache
_MASK = (1 << 64) - 1
_HALF, _FACTOR = np.uint64(32), np.uint64(FACTOR)

Words = npt.NDArray[np.uint64]


def digests_for(device_type: str) -> tuple[str, ...]:
    """Return the algorithms that an instance with pools on such a device offers, preferred first."""
    return (DIGEST_XXH3, DIGEST_WORDS) if device_type == "cpu" else (DIGEST_WORDS,)


def digest(payload: Any, algorithm: str = DIGEST_XXH3) -> int:
    """Return the 64-bit digest of bytes and their places, in [0, 2**64).

    Copies nothing, and releases the GIL for large payloads.

    Args:
        payload: Contiguous bytes in host memory: bytes, memoryview, NumPy array, or torch CPU tensor of any dtype.
        algorithm: `DIGEST_XXH3` or `DIGEST_WORDS`.

    Raises:
        ConfigError: The algorithm is neither of the two.
        LocalProtocolError: The payload is on a device, or not contiguous.
    """
    found = HostDigest(algorithm)
    found.update(payload)
    return found.value()


class HostDigest:
    """A digest of payload that comes part by part. Raises ConfigError for an unknown algorithm."""

    def __init__(self, algorithm: str) -> None:
        if algorithm not in (DIGEST_XXH3, DIGEST_WORDS):
            raise ConfigError(f"digest algorithm is {algorithm!r}; must be {DIGEST_XXH3} or {DIGEST_WORDS}")
        self.algorithm = algorithm
        self._xxh3 = xxhash.xxh3_64()
        self._sum = 0
        self._num_words = 0
        self._rest = b""  # of a word that is not whole yet
        self._has_parts = False
        self._whole: int | None = None

    def update(self, part: Any) -> None:
        """Take in the bytes after the last part. For `part` and errors see `digest`."""
        view = _bytes_of(part)
        if self._whole is not None:
            raise LocalProtocolError(f"a part of {len(view)} bytes follows the digest of the whole payload")
        self._has_parts = True
        if self.algorithm == DIGEST_XXH3:
            self._xxh3.update(view)
            return
        if self._rest:
            missing = min(WORD_BYTES - len(self._rest), len(view))
            self._rest += view[:missing].tobytes()
            view = view[missing:]
            if len(self._rest) < WORD_BYTES:
                return
            self._add(np.frombuffer(self._rest, dtype=np.uint64))
        whole = len(view) // WORD_BYTES * WORD_BYTES
        self._add(np.frombuffer(view[:whole], dtype=np.uint64))
        self._rest = view[whole:].tobytes()

    def take(self, value: int) -> None:
        """Take in the digest of the whole payload, which a copy has computed. Raise LocalProtocolError after another part."""
        if self._has_parts:
            raise LocalProtocolError("the digest of a whole payload was added after parts of it")
        self._has_parts, self._whole = True, value

    def value(self) -> int:
        """Return the digest of all parts so far, in [0, 2**64)."""
        if self._whole is not None:
            return self._whole
        if self.algorithm == DIGEST_XXH3:
            return self._xxh3.intdigest()
        if not self._rest:
            return self._sum
        last = np.frombuffer(self._rest.ljust(WORD_BYTES, b"\0"), dtype=np.uint64)
        return (self._sum + words_sum(last, self._num_words)) & _MASK

    def _add(self, words: Words) -> None:
        self._sum = (self._sum + words_sum(words, self._num_words)) & _MASK
        self._num_words += len(words)


def words_sum(words: Words, first_word: int) -> int:
    """Return the sum of words, uint64 [n], little-endian. The first is word number `first_word` of
    its payload; see the module."""
    total = 0
    first_keys = np.arange(1, min(len(words), _BLOCK_WORDS) + 1, dtype=np.uint64) * np.uint64(STEP)
    for begin in range(0, len(words), _BLOCK_WORDS):
        block = words[begin : begin + _BLOCK_WORDS]
        keys = first_keys[: len(block)] + np.uint64((first_word + begin) * STEP & _MASK)
        mixed = block + keys
        mixed ^= mixed >> _HALF
        mixed *= _FACTOR
        mixed += keys
        mixed ^= mixed >> _HALF
        mixed *= _FACTOR
        mixed ^= mixed >> _HALF
        total += int(mixed.sum(dtype=np.uint64))
    return total & _MASK


def _bytes_of(payload: Any) -> memoryview:
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(payload, torch.Tensor):
        if payload.device.type != "cpu" or not payload.is_contiguous():
            raise LocalProtocolError(
                f"digest of a tensor on {payload.device} with stride {payload.stride()}; it must be contiguous and on cpu"
            )
        # Through uint8, because NumPy knows no bfloat16 or float8.
        payload = payload.detach().reshape(-1).view(torch.uint8).numpy()
    view = memoryview(payload)
    if not view.c_contiguous:
        raise LocalProtocolError(f"digest of a buffer of shape {view.shape} and strides {view.strides}; it must be contiguous")
    return view.cast("B") if view.nbytes else memoryview(b"")
