"""The thread that watches signals: it reports gathers of the watched sessions alone, on the loop."""

from __future__ import annotations

import asyncio
import ctypes
from typing import Any

import pytest

from tests.transport.host_cuda import HostWords
from transfer.copy import compiled_copy
from transfer.receive import signal_watch
from transfer.receive.signal_watch import SignalWatch
from transfer.transport.shared_memory import shared_memory
from transfer.transport.signals import NUM_BYTES, NUM_ENTRIES, ArrivalSignal, SignalReader, SignalWriter


class Sessions:
    def __init__(self, count: int) -> None:
        self.memories = [shared_memory(NUM_BYTES) for _ in range(count)]
        self.writers = [SignalWriter(HostWords(memory)) for memory in self.memories]
        self.readers = [SignalReader(HostWords(memory)) for memory in self.memories]
        self.seen: asyncio.Queue[tuple[int, int]] = asyncio.Queue()
        self.watch = SignalWatch(asyncio.get_running_loop(), self._on_signal, self._on_crash)

    def gather(self, session: int, grant: int) -> bool:
        signal = self.writers[session].of(grant)
        signal.begin(0, ctypes.addressof(ctypes.c_uint64()))
        return signal.is_sent

    async def next(self) -> tuple[int, int]:
        return await asyncio.wait_for(self.seen.get(), 20)

    def _on_signal(self, session: int, signal: ArrivalSignal) -> None:
        self.seen.put_nowait((session, signal.grant))
        signal.close()

    def _on_crash(self, error: BaseException) -> None:
        raise AssertionError(f"the watch crashed: {error!r}")


@pytest.mark.parametrize("is_compiled", [True, False])
async def test_gathers_of_watched_sessions_are_reported(is_compiled: bool, monkeypatch: Any) -> None:
    if not is_compiled:
        monkeypatch.setattr(compiled_copy, "_host_copy", None)
    elif not compiled_copy.IS_BUILT:
        pytest.skip("transfer.copy._host_copy is not built: make setup builds it")
    sessions = Sessions(2)
    watch, readers = sessions.watch, sessions.readers
    watch.begin(0, readers[0])
    watch.begin(0, readers[0])
    sessions.gather(0, 10)
    assert await sessions.next() == (0, 10)
    watch.end(0)  # one of two
    sessions.gather(1, 20)  # not watched yet
    sessions.gather(0, 11)
    assert await sessions.next() == (0, 11)
    watch.begin(1, readers[1])  # while the thread waits for the other
    assert await sessions.next() == (1, 20)
    watch.end(0)
    sessions.gather(1, 21)
    assert await sessions.next() == (1, 21)
    watch.begin(0, readers[0])
    sessions.gather(0, 12)
    assert await sessions.next() == (0, 12)
    watch.close()


@pytest.mark.parametrize("written", [{8: 5}, {8: 1, 10: 5}])
async def test_a_stopped_session_is_not_looked_at(written: dict[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Its grants can last for long, and a writer that writes a number too high would keep the thread from waiting."""
    looks: list[float] = []

    def wait(words: Any, *, timeout_s: float, most_pause_s: float) -> bool:
        looks.append(timeout_s)
        return compiled_copy.wait_for_words(words, timeout_s=timeout_s, most_pause_s=most_pause_s)

    monkeypatch.setattr(signal_watch, "wait_for_words", wait)
    sessions = Sessions(2)
    sessions.watch.begin(0, sessions.readers[0])
    for word, number in written.items():
        HostWords(sessions.memories[0]).words[word] = number
    async with asyncio.timeout(20):
        while not sessions.readers[0].is_stopped:
            await asyncio.sleep(0.01)
    await asyncio.sleep(0.1)
    assert len(looks) < 5
    sessions.watch.begin(1, sessions.readers[1])
    sessions.gather(1, 20)
    assert await sessions.next() == (1, 20)
    sessions.watch.close()


async def test_a_resumed_session_is_looked_at_again() -> None:
    """Also if one of its grants has lasted through the whole pause, and no other session is watched."""
    sessions = Sessions(1)
    watch, reader = sessions.watch, sessions.readers[0]
    watch.begin(0, reader)
    sessions.gather(0, 10)
    assert await sessions.next() == (0, 10)
    reader.stop()
    watch.begin(1, reader)  # so that the thread sees it
    watch.end(1)
    async with asyncio.timeout(20):
        while not watch._changed._waiters:  # type: ignore[attr-defined]  # noqa: SLF001
            await asyncio.sleep(0.01)
    watch.resume(reader)
    watch.begin(0, reader)
    assert sessions.gather(0, 11)
    assert await sessions.next() == (0, 11)
    watch.close()


async def test_more_gathers_than_entries_all_come() -> None:
    sessions = Sessions(1)
    sessions.watch.begin(0, sessions.readers[0])
    for begin in range(0, 5 * NUM_ENTRIES, NUM_ENTRIES):
        grants = range(begin, begin + NUM_ENTRIES)
        assert all(sessions.gather(0, grant) for grant in grants)
        assert [await sessions.next() for _ in grants] == [(0, grant) for grant in grants]
    sessions.watch.close()
