"""The envelope of a stored page: whatever lies in a shared directory or a bucket under the name of a page."""

from __future__ import annotations

import random
import struct

import xxhash

from fuzz.target import Target, require
from fuzz.trees import BYTE_SHARE, changed_bytes
from transfer.errors import TransferError
from transfer.storage.base import Outcome
from transfer.storage.envelope import HEADER_BYTES, check, header_of

KEY = f"{'0a' * 16}/{'1b' * 32}-full-0of2"
PAGE = bytes(range(256))
_DIGEST_BYTES = 8
_FIELDS = ((0, 8), (8, 4), (12, 4), (16, 8), (24, 16), (40, 256))  # offset and length


class Miss(TransferError):
    """What was stored is not that page."""


def stored(key: str, page: bytes) -> bytes:
    return header_of(key, memoryview(page)) + page


def check_stored(data: bytes) -> None:
    page = bytearray(len(PAGE))
    rest = data[HEADER_BYTES : HEADER_BYTES + len(PAGE)]
    page[: len(rest)] = rest
    outcome = check(KEY, data[:HEADER_BYTES], memoryview(page), num_bytes=len(data))
    require(outcome in (Outcome.OK, Outcome.CORRUPT, Outcome.FOREIGN), f"a page is {outcome}")
    if outcome is not Outcome.OK:
        raise Miss(outcome)
    require(data == stored(KEY, bytes(page)), "a page was taken that was stored in another way")


def mutate(data: bytes, rng: random.Random) -> bytes:
    """Mostly with digests that are right again, for everything would end at them otherwise."""
    if rng.random() < BYTE_SHARE or len(data) < HEADER_BYTES:
        return changed_bytes(data, rng)
    head, page = bytearray(data[: HEADER_BYTES - _DIGEST_BYTES]), data[HEADER_BYTES:]
    choice = rng.randrange(4)
    if choice == 0:
        page = changed_bytes(page, rng)
    elif choice == 1:
        offset, length = rng.choice(_FIELDS)
        head[offset : offset + length] = changed_bytes(bytes(head[offset : offset + length]), rng)[:length].ljust(length, b"\0")
    elif choice == 2:
        head[16:24] = struct.pack("<Q", rng.choice((0, len(page) - 1 & 2**64 - 1, len(page) + 1, 2**63, 2**64 - 1)))
    else:
        head[rng.randrange(len(head))] ^= 1 << rng.randrange(8)
    if rng.random() < 0.5:
        head[24:40] = xxhash.xxh3_128_digest(page)
    return bytes(head) + struct.pack("<Q", xxhash.xxh3_64_intdigest(head)) + page


TARGET = Target(
    name="stored_page",
    about="envelopes of stored pages",
    modules=("transfer.storage.envelope",),
    check=check_stored,
    refuses=(Miss,),
    mutate=mutate,
    seeds=lambda: [stored(KEY, PAGE), stored(KEY, bytes(len(PAGE)))],
)
