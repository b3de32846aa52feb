"""Keys, pages, and a store in memory that a test can block, break or observe."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from transfer.storage.base import Outcome, Store

PAGE_BYTES = 1024


def key_of(number: int) -> str:
    return f"{'0a' * 16}/{hashlib.sha256(str(number).encode()).hexdigest()}-full-0of1"


def page_of(number: int, num_bytes: int) -> bytes:
    """Return bytes that no other page has."""
    return hashlib.shake_128(str(number).encode()).digest(64).ljust(num_bytes, bytes([number % 251 + 1]))[:num_bytes]


def put(store: Store, *numbers: int, num_bytes: int = PAGE_BYTES) -> list[Outcome]:
    return store.put([(key_of(number), memoryview(page_of(number, num_bytes))) for number in numbers])


def get(store: Store, number: int, num_bytes: int = PAGE_BYTES) -> Outcome:
    """Return what became of it; when it was found, it is the page."""
    view = memoryview(bytearray(num_bytes))
    (outcome,) = store.get([(key_of(number), view)])
    assert outcome is not Outcome.OK or bytes(view) == page_of(number, num_bytes)
    return outcome


def file_of(directory: Path | str, key: str) -> Path:
    """Return the file of a page in a directory store. Nodes of all versions share the store, so this never changes."""
    fingerprint, _, name = key.partition("/")
    return Path(directory) / fingerprint / name[:2] / name


BROKEN: dict[str, Callable[[bytes], bytes]] = {
    "flipped": lambda content: content[:-1] + bytes([content[-1] ^ 1]),
    "truncated": lambda content: content[:-1],
    "header only": lambda content: content[:100],
    "longer": lambda content: content + b"\0",
    "thrice": lambda content: content * 3,
    "empty": lambda content: b"",
    "zeros": lambda content: bytes(len(content)),  # what is left of a page that was not flushed when the power went
}
"""Contents that are no whole page."""


class MemoryStore:
    """Keeps pages in a dictionary. While `gate` is not set, every call of `gated` hangs; `error` is raised by every call.

    `hang_after`: so many calls from now on are served, and then the gate closes.
    """

    name = "memory"

    def __init__(self) -> None:
        self.pages: dict[str, bytes] = {}
        self.gate = threading.Event()
        self.gate.set()
        self.gated = {"put", "get", "exists", "delete"}
        self.error: Exception | None = None
        self.failing: set[str] = set()
        self.num_calls = 0
        self.hang_after: int | None = None
        self.entered = threading.Semaphore(0)  # released at each call, before the gate

    def put(self, pages: Sequence[tuple[str, memoryview]], *, used_ns: int | None = None) -> list[Outcome]:
        self._enter("put")
        for key, view in pages:
            if key not in self.failing:
                self.pages[key] = bytes(view)
        return [Outcome.FAILED if key in self.failing else Outcome.OK for key, _ in pages]

    def get(self, pages: Sequence[tuple[str, memoryview]], *, used_ns: int | None = None) -> list[Outcome]:
        self._enter("get")
        outcomes = []
        for key, view in pages:
            view[:] = self.pages.get(key, bytes(len(view)))
            outcomes.append(Outcome.OK if key in self.pages else Outcome.MISSING)
        return outcomes

    def exists(self, keys: Sequence[str]) -> list[Outcome]:
        self._enter("exists")
        return [Outcome.OK if key in self.pages else Outcome.MISSING for key in keys]

    def delete(self, keys: Sequence[str]) -> list[Outcome]:
        self._enter("delete")
        return [Outcome.MISSING if self.pages.pop(key, None) is None else Outcome.OK for key in keys]

    def _enter(self, op: str) -> None:
        self.num_calls += 1
        if self.hang_after is not None:
            self.hang_after -= 1
            if self.hang_after < 0:
                self.hang_after = None
                self.gate.clear()
        self.entered.release()
        if op in self.gated:
            self.gate.wait()
        if self.error is not None:
            raise self.error


class Seen:
    """The calls of a client to its `StoreMetrics`."""

    def __init__(self) -> None:
        self.operations: list[tuple[str, tuple[Outcome, ...]]] = []
        self.num_bytes = 0
        self.depths: list[int] = []
        self.circuits: list[tuple[str, str]] = []

    def operation_finished(self, op: str, outcomes: Sequence[Outcome], *, num_bytes: int, seconds: float) -> None:
        assert seconds >= 0
        self.operations.append((op, tuple(outcomes)))
        self.num_bytes += num_bytes

    def queue_changed(self, num_pages: int) -> None:
        self.depths.append(num_pages)

    def circuits_changed(self, *, read: str, write: str) -> None:
        self.circuits.append((read, write))
