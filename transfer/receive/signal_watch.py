"""A thread that watches the signals of a rank's writers while granted pieces are expected."""

from __future__ import annotations

import asyncio
import threading
from array import array
from collections.abc import Callable

from transfer.copy.compiled_copy import wait_for_words
from transfer.transport.signals import ArrivalSignal, SignalReader

_WAIT_S = 1.0
# Maximum pauses between two looks. On a virtual machine, a look every 0.2 ms takes 11 % of a core, and one every 2 ms takes 2 %.
_NEAR_PAUSE_S = 0.0002
_FAR_PAUSE_S = 0.002
_FULL_WAIT_S = 0.001  # while all entries of a session are in use, because no word reports when one is closed


class SignalWatch:
    """Watches sessions between `begin` and `end`, except while their signals are stopped. The thread starts with the first
    session, and sleeps while there is none.

    Args:
        on_signal: Called on the loop with the session and a gather that has begun.
        on_crash: Called on the loop with an unexpected exception.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        on_signal: Callable[[int, ArrivalSignal], None],
        on_crash: Callable[[BaseException], None],
    ) -> None:
        self._loop = loop
        self._on_signal = on_signal
        self._on_crash = on_crash
        self._changed = threading.Condition()
        self._readers: dict[int, SignalReader] = {}  # watched
        self._num_awaited: dict[int, int] = {}
        self._changes = array("Q", [0])  # number of changes: the thread waits for this word, too
        self._thread: threading.Thread | None = None
        self._is_closed = False

    def begin(self, session: int, reader: SignalReader) -> None:
        """Watch a session until `end` was called as often as `begin`."""
        self._num_awaited[session] = self._num_awaited.get(session, 0) + 1
        if self._num_awaited[session] == 1:
            with self._changed:
                self._readers[session] = reader
                self._wake()
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="signals", daemon=True)
                self._thread.start()

    def end(self, session: int) -> None:
        """Undo one `begin`."""
        self._num_awaited[session] -= 1
        if not self._num_awaited[session]:
            del self._num_awaited[session]
            with self._changed:
                del self._readers[session]
                self._wake()

    def resume(self, reader: SignalReader) -> None:
        """Take the signals of a stopped session again, see `SignalReader.resume`."""
        with self._changed:
            reader.resume()
            self._wake()

    def close(self) -> None:
        """End the thread."""
        with self._changed:
            self._is_closed = True
            self._wake()

    def _wake(self) -> None:
        self._changes[0] += 1
        self._changed.notify()

    def _run(self) -> None:
        try:
            while not self._is_closed:
                self._look()
        except Exception as error:
            self._post(self._on_crash, error)

    def _look(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._is_closed or not all(reader.is_stopped for reader in self._readers.values()))
            readers = {session: reader for session, reader in self._readers.items() if not reader.is_stopped}
            changes = self._changes[0]
        words = [word for reader in readers.values() if (word := reader.awaited) is not None]
        timeout_s = _WAIT_S if len(words) == len(readers) else _FULL_WAIT_S
        pause_s = _NEAR_PAUSE_S if any(reader.is_near for reader in readers.values()) else _FAR_PAUSE_S
        wait_for_words([*words, (self._changes.buffer_info()[0], changes + 1)], timeout_s=timeout_s, most_pause_s=pause_s)
        found = [(session, signal) for session, reader in readers.items() for signal in reader.take()]
        if found:
            self._post(self._deliver, found)

    def _deliver(self, found: list[tuple[int, ArrivalSignal]]) -> None:
        for session, signal in found:
            self._on_signal(session, signal)

    def _post(self, callback: Callable[..., None], argument: object) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(callback, argument)
