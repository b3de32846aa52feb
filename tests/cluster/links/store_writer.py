"""A process that stores pages until it is killed: ``python store_writer.py DIRECTORY SEED [MAX_BYTES]``."""

from __future__ import annotations

import sys
from pathlib import Path

from tests.storage.stores import key_of, page_of
from transfer.storage.base import Outcome
from transfer.storage.directory import DirectoryStore

NUM_PAGES = 200
PAGE_BYTES = 1 << 18


def main(directory: str, seed: str, max_bytes: str = "") -> None:
    store = DirectoryStore(Path(directory), max_bytes=int(max_bytes) if max_bytes else None)
    print("writing", flush=True)
    for number in range(int(seed) * NUM_PAGES, (int(seed) + 1) * NUM_PAGES):
        assert store.put([(key_of(number), memoryview(page_of(number, PAGE_BYTES)))]) == [Outcome.OK]


if __name__ == "__main__":
    main(*sys.argv[1:])
