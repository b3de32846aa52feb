"""The envelope: whatever happens to the bytes of a stored page, it is that page or it is a miss."""

from __future__ import annotations

import struct

import pytest
import xxhash

from transfer.storage.base import Outcome
from transfer.storage.envelope import HEADER_BYTES, MAGIC, check, header_of
from transfer.storage.keys import MAX_KEY_CHARS

KEY = f"{'0a' * 16}/{'1b' * 32}-full-0of2"
PAGE = bytes(range(256)) + b"kvferry"


def read(stored: bytes, *, key: str = KEY, page_bytes: int = len(PAGE)) -> Outcome:
    """What a store makes of a file of those bytes."""
    page = bytearray(page_bytes)
    rest = stored[HEADER_BYTES:][:page_bytes]
    page[: len(rest)] = rest
    outcome = check(key, stored[:HEADER_BYTES], memoryview(page), num_bytes=len(stored))
    assert outcome is not Outcome.OK or page == PAGE
    return outcome


def stored(key: str = KEY, page: bytes = PAGE) -> bytes:
    return header_of(key, memoryview(page)) + page


def test_what_was_stored_is_read() -> None:
    assert read(stored()) is Outcome.OK
    assert len(header_of(KEY, memoryview(PAGE))) == HEADER_BYTES


def test_the_header_is_what_the_module_says() -> None:
    """Bytes on disks outlive versions of kvferry: these are reckoned here by other means."""
    header = header_of(KEY, memoryview(PAGE))
    expected = MAGIC + struct.pack("<IIQ", 1, 512, len(PAGE)) + xxhash.xxh3_128(PAGE).digest()
    expected += KEY.encode().ljust(256, b"\0")
    expected = expected.ljust(504, b"\0")
    assert header == expected + xxhash.xxh3_64(expected).intdigest().to_bytes(8, "little")


def test_every_bit_that_flips_is_noticed() -> None:
    whole = stored()
    for position in range(len(whole)):
        for bit in range(8):
            broken = bytearray(whole)
            broken[position] ^= 1 << bit
            outcome = read(bytes(broken))
            # A flip in the version cannot be told from another version.
            assert outcome is (Outcome.FOREIGN if 8 <= position < 12 else Outcome.CORRUPT), (position, bit)


def test_every_length_but_the_right_one_is_noticed() -> None:
    whole = stored()
    assert {read(whole[:length]) for length in range(len(whole))} == {Outcome.CORRUPT}
    assert read(whole + b"\0") is Outcome.CORRUPT
    assert read(whole + whole) is Outcome.CORRUPT


@pytest.mark.parametrize(
    "key",
    [KEY.replace("0a", "0b"), KEY.replace("1b", "1c"), KEY.replace("0of2", "1of2"), KEY[:-1], KEY + "x"],
)
def test_a_page_of_another_model_prefix_or_rank_is_foreign(key: str) -> None:
    assert read(stored(key)) is Outcome.FOREIGN


def test_a_whole_header_of_another_kind_is_foreign() -> None:
    for begin, replacement in ((0, b"SOMEBODY"), (12, struct.pack("<I", 1024)), (300, b"a field of tomorrow")):
        head = bytearray(stored()[:504])
        head[begin : begin + len(replacement)] = replacement
        digest = xxhash.xxh3_64(bytes(head)).intdigest().to_bytes(8, "little")
        assert read(bytes(head) + digest + PAGE) is Outcome.FOREIGN


def test_a_page_of_another_size_is_not_read_into_this_one() -> None:
    assert read(stored(), page_bytes=len(PAGE) - 1) is Outcome.CORRUPT
    assert read(stored(), page_bytes=len(PAGE) + 1) is Outcome.CORRUPT


def test_the_longest_key_fits() -> None:
    key = f"{'0a' * 16}/{'b' * (MAX_KEY_CHARS - 33)}"
    assert read(stored(key), key=key) is Outcome.OK
