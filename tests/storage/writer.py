"""A process that stores pages until it is killed: ``python writer.py DIRECTORY SEED [MAX_BYTES]``."""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path

from transfer.storage.base import Outcome
from transfer.storage.directory import DirectoryStore

NUM_PAGES = 200
PAGE_BYTES = 1 << 18


def key_of(number: int) -> str:
    return f"{'0a' * 16}/{hashlib.sha256(str(number).encode()).hexdigest()}-full-0of1"


def page_of(number: int, num_bytes: int) -> bytes:
    """Bytes that no other page has."""
    return hashlib.shake_128(str(number).encode()).digest(64).ljust(num_bytes, bytes([number % 251 + 1]))[:num_bytes]


def main(directory: str, seed: str, max_bytes: str = "") -> None:
    store = DirectoryStore(Path(directory), max_bytes=int(max_bytes) if max_bytes else None)
    print("writing", flush=True)
    for number in range(int(seed) * NUM_PAGES, (int(seed) + 1) * NUM_PAGES):
        assert store.put([(key_of(number), memoryview(page_of(number, PAGE_BYTES)))]) == [Outcome.OK]


if __name__ == "__main__":
    main(*sys.argv[1:])
