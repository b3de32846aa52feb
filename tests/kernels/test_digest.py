"""The two digests: known values, every kind of buffer, and what the words' one notices."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from transfer.copy import Kernels, add_digest, torch_copy
from transfer.copy.digest import DIGEST_WORDS, DIGEST_XXH3, STEP, HostDigest, digest, digests_for, words_sum
from transfer.errors import ConfigError, LocalProtocolError

MASK = 2**64 - 1
ALGORITHMS = (DIGEST_XXH3, DIGEST_WORDS)


def test_known_values_so_that_two_versions_agree() -> None:
    assert ALGORITHMS == ("xxh3-64", "kvferry-words-64")
    assert digest(b"") == 0x2D06800538D394C2
    assert digest(b"kvferry") == 0xC0EF06BFC9DA53BB
    assert digest(b"", DIGEST_WORDS) == 0
    assert digest(b"kvferry", DIGEST_WORDS) == 0x0FC198E4EA1C9955
    assert digest(bytes(range(20)), DIGEST_WORDS) == 0xB58D963434D2E5F5


def by_definition(payload: bytes) -> int:
    """The words' digest in Python's integers."""
    total = 0
    for number, begin in enumerate(range(0, len(payload), 8)):
        word = int.from_bytes(payload[begin : begin + 8].ljust(8, b"\0"), "little")
        key = (number + 1) * 0x9E3779B97F4A7C15
        x = (word + key) & MASK
        x = (x ^ (x >> 32)) * 0xD6E8FEB86659FD93 + key & MASK
        x = (x ^ (x >> 32)) * 0xD6E8FEB86659FD93 & MASK
        total += x ^ (x >> 32)
    return total & MASK


@settings(max_examples=50)
@given(payload=st.binary(max_size=200), cuts=st.lists(st.integers(0, 200), max_size=5))
def test_parts_of_any_size_are_the_whole(payload: bytes, cuts: list[int]) -> None:
    edges = [0, *sorted(min(cut, len(payload)) for cut in cuts), len(payload)]
    for algorithm in ALGORITHMS:
        found = HostDigest(algorithm)
        for begin, end in itertools.pairwise(edges):
            found.update(payload[begin:end])
            found.value()  # asking changes nothing
        assert found.value() == digest(payload, algorithm)
    assert digest(payload, DIGEST_WORDS) == by_definition(payload)
    tensor = torch.frombuffer(bytearray(payload), dtype=torch.uint8) if payload else torch.empty(0, dtype=torch.uint8)
    assert int(torch_copy.words_sum(tensor)) % 2**64 == digest(payload, DIGEST_WORDS)


def test_a_digest_of_the_whole_is_not_mixed_with_parts() -> None:
    whole, parts = HostDigest(DIGEST_XXH3), HostDigest(DIGEST_XXH3)
    whole.take(7)
    assert whole.value() == 7
    with pytest.raises(LocalProtocolError, match="a part of 4 bytes follows the digest of the whole payload"):
        whole.update(b"more")
    parts.update(b"part")
    with pytest.raises(LocalProtocolError, match="digest of a whole payload was added after parts of it"):
        parts.take(7)


def test_large_payloads_are_summed_over_blocks() -> None:
    payload = random.Random(1).randbytes(1_000_003)
    assert digest(payload, DIGEST_WORDS) == by_definition(payload)
    words = np.frombuffer(payload[:800_000], dtype=np.uint64)
    halves = words_sum(words[:30_001], 0) + words_sum(words[30_001:], 30_001)
    assert halves & MASK == words_sum(words, 0) == digest(payload[:800_000], DIGEST_WORDS)


@pytest.mark.parametrize(("begin", "num_bytes"), [(0, 16 << 20), (3, (16 << 20) + 5), (8, 11), (0, 0)])
def test_plain_torch_adds_the_words_of_a_wire(begin: int, num_bytes: int) -> None:
    """In blocks, from any place of its memory on; the last word is not whole."""
    memory = torch.randint(256, ((16 << 20) + 64,), dtype=torch.uint8, generator=torch.Generator().manual_seed(2))
    wire = memory[begin:]
    total = torch.full((1,), 3, dtype=torch.int64)
    add_digest(total, wire, num_bytes, Kernels.TORCH)
    assert (int(total) - 3) % 2**64 == digest(wire[:num_bytes], DIGEST_WORDS)


PLAIN = {
    "random": np.random.default_rng(3).integers(0, 2**64, 24, dtype=np.uint64),
    "zeros": np.zeros(24, dtype=np.uint64),
    "numbered": np.arange(24, dtype=np.uint64),
    "steps": np.arange(24, dtype=np.uint64) * np.uint64(STEP),  # as far apart as the places are
}


@pytest.mark.parametrize("name", PLAIN)
def test_every_bit_of_every_word_is_seen(name: str) -> None:
    """Any one bit, or the same bit of any two words, sign bits and lowest bits too: what a broken lane or a lost carry does."""
    words = PLAIN[name]
    found = [digest(words, DIGEST_WORDS)]
    for bit in (0, 7, 15, 31, 32, 47, 63):
        for first in range(24):
            for second in range(first, 24):
                changed = words.copy()
                changed[[first, second]] ^= np.uint64(1 << bit)
                found.append(digest(changed, DIGEST_WORDS))
    assert len(set(found)) == len(found)


def test_algorithms_of_devices() -> None:
    assert digests_for("cpu") == (DIGEST_XXH3, DIGEST_WORDS)
    assert digests_for("cuda") == (DIGEST_WORDS,)
    with pytest.raises(ConfigError, match="digest algorithm is 'crc'; must be xxh3-64 or kvferry-words-64"):
        HostDigest("crc")
