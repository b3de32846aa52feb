"""Signals: words in host memory in which a writer's stream reports the start and the end of a gather into the target's ring.

Between two GPUs of one machine, the messages about a gather take longer than the gather. So the stream that gathers writes these
words itself, and the target's stream waits for them (docs/adr/0083-signals-of-the-writers-stream.md). A signal replaces
`ChunkReady`. If a signal is missed, the message follows.

The memory belongs to the target, and both processes map it. It is a ring of entries, one for each gather, in the order of the
writer's stream:

====  =============  ==============================================================================================
word  written by     contains
====  =============  ==============================================================================================
0     writer's host  number of the entry (from 1), once its gather is queued
1     writer's host  position at which the gather's grant begins, which identifies the grant
2     stream         the number, once the stream has reached the gather
3     stream         sum of the stream's digests before the gather
4     stream         sum after the gather; the difference is the gather's digest
5     stream         the number, once the gather has ended; the target writes it to give up the signal
====  =============  ==============================================================================================

Entry 0 is not used for gathers. The target writes its words. Word 0 is the number of entries that it has closed, without gaps.
A writer reuses an entry after the target has closed it. It sends no signal while all entries are in use. While word 1 is not 0,
signals are stopped: the writer sends messages, also for gathers whose signals are on their way, and the target ignores those.
"""

from __future__ import annotations

from typing import Final, Protocol

SIGNAL_LIMIT_S: Final = 0.05
"""Maximum time that a stream waits for the end of a running gather. During the wait, calls of the process that wait for the whole
device, such as those that free memory, do not return (docs/adr/0083-signals-of-the-writers-stream.md)."""

SIGNAL_PAUSE_S: Final = 60.0
"""Time without signals after one was given up. So a device that is always slow causes one such wait per minute."""

LAYOUT: Final = 1
"""Version of the words. Both ends must use the same version."""

NUM_BYTES: Final = 8192
_WORD_BYTES: Final = 8
_ENTRY_WORDS: Final = 8  # a cache line
NUM_ENTRIES: Final = NUM_BYTES // (_WORD_BYTES * _ENTRY_WORDS) - 1
_NUM_CLOSED, _IS_STOPPED = range(2)
_QUEUED, _GRANT, _BEGUN, _BASE, _TOTAL, _ENDED = range(6)
_MASK: Final = 2**64 - 1


class DeviceWords(Protocol):
    """Words of host memory that streams of a device can use.

    Attributes:
        words: The memory as unsigned 64-bit numbers.
        address: Address of word 0.
    """

    @property
    def words(self) -> memoryview: ...

    @property
    def address(self) -> int: ...

    def write(self, stream: int, word: int, value: int) -> None:
        """Queue a write, which becomes visible after all earlier writes of the stream."""

    def wait(self, stream: int, word: int, value: int) -> None:
        """Let the stream wait until the word is at least `value`."""

    def copy(self, stream: int, word: int, source: int) -> None:
        """Queue a copy of the 8 bytes at the device address `source`."""


def _word(number: int, field: int) -> int:
    return (1 + (number - 1) % NUM_ENTRIES) * _ENTRY_WORDS + field


class SignalWriter:
    """The writer's end. Owned by the thread that queues the gathers."""

    def __init__(self, words: DeviceWords) -> None:
        self._words = words
        self._num_used = 0

    def of(self, grant: int) -> GatherSignal:
        """Return the signal of a gather that will be queued next, into the grant that begins at position `grant`."""
        return GatherSignal(self, grant)

    @property
    def is_stopped(self) -> bool:
        """Whether the target ignores signals at present."""
        return self._words.words[_IS_STOPPED] != 0

    def begin(self, grant: int, stream: int, total: int) -> int:
        """Queue the words of an entry that precede the gather. Return its number, or 0 if no signal can be sent."""
        words = self._words.words
        if self.is_stopped or self._num_used - words[_NUM_CLOSED] >= NUM_ENTRIES:
            return 0
        self._num_used += 1
        number = self._num_used
        words[_word(number, _GRANT)] = grant
        words[_word(number, _QUEUED)] = number
        self._words.copy(stream, _word(number, _BASE), total)
        self._words.write(stream, _word(number, _BEGUN), number)
        return number

    def end(self, number: int, stream: int, total: int) -> None:
        """Queue the words of the entry that follow the gather."""
        self._words.copy(stream, _word(number, _TOTAL), total)
        self._words.write(stream, _word(number, _ENDED), number)


class GatherSignal:
    """The signal of one gather. Call `begin` before the gather is queued, and `end` after it.

    Args:
        stream, total: The stream, and the device address of the 64-bit sum of its digests.
    """

    def __init__(self, writer: SignalWriter, grant: int) -> None:
        self._writer = writer
        self._grant = grant
        self._number = 0

    @property
    def is_sent(self) -> bool:
        """Whether the signal has an entry, and the target still accepts signals."""
        return self._number > 0 and not self._writer.is_stopped

    def begin(self, stream: int, total: int) -> None:
        self._number = self._writer.begin(self._grant, stream, total)

    def end(self, stream: int, total: int) -> None:
        if self._number:
            self._writer.end(self._number, stream, total)


class SignalReader:
    """The target's end. One thread calls `awaited` and `take`. The owner of the session calls the other methods.

    Attributes:
        words: The memory, which the writer also maps.
        is_stopped: Whether signals are ignored at present.
    """

    def __init__(self, words: DeviceWords) -> None:
        self.words = words
        self.is_stopped = False
        self._is_distrusted = False
        self._num_taken = 0
        self._closed: set[int] = set()  # entries above the first open one
        self._num_closed = 0

    @property
    def is_near(self) -> bool:
        """Whether the next gather is queued. It waits at most for a step of the engine, while a grant can wait far longer."""
        number = self._num_taken + 1
        return self.words.words[_word(number, _QUEUED)] == number

    @property
    def awaited(self) -> tuple[int, int] | None:
        """The address of the word that changes next, and its new value. None while all entries are in use, and after `stop`."""
        number = self._num_taken + 1
        field = _BEGUN if self.is_near else _QUEUED
        unused = self._is_full or self.is_stopped
        return None if unused else (self.words.address + _word(number, field) * _WORD_BYTES, number)

    @property
    def _is_full(self) -> bool:
        return self._num_taken - self._num_closed >= NUM_ENTRIES

    def take(self) -> list[ArrivalSignal]:
        """Return the signals of the gathers that have begun since the last call, in order.

        If the writer skips an entry, signals are stopped. Otherwise the waiting thread would look without pauses.
        """
        found: list[ArrivalSignal] = []
        words = self.words.words
        while not self._is_full and not self.is_stopped:
            number = self._num_taken + 1
            begun = words[_word(number, _BEGUN)]
            if max(begun, words[_word(number, _QUEUED)]) > number:
                self._is_distrusted = True
                self.stop()
            elif begun == number:
                self._num_taken = number
                found.append(ArrivalSignal(self, self.words, number, words[_word(number, _GRANT)]))
            else:
                break
        return found

    def close(self, number: int) -> None:
        """Let the writer reuse an entry. Entries can be closed in any order."""
        self._closed.add(number)
        while self._num_closed + 1 in self._closed:
            self._num_closed += 1
            self._closed.remove(self._num_closed)
        self.words.words[_NUM_CLOSED] = self._num_closed

    def stop(self) -> None:
        """Make the writer send no more signals, and ignore those that still arrive."""
        self.is_stopped = True
        self.words.words[_IS_STOPPED] = 1

    def resume(self) -> None:
        """Accept signals again, unless the writer has skipped an entry."""
        if not self._is_distrusted:
            self.words.words[_IS_STOPPED] = 0
            self.is_stopped = False


class ArrivalSignal:
    """A gather that has begun, as the target sees it.

    Attributes:
        grant: Position at which the gather's grant begins.
    """

    def __init__(self, reader: SignalReader, words: DeviceWords, number: int, grant: int) -> None:
        self.grant = grant
        self._reader = reader
        self._words = words
        self._number = number

    def wait_on(self, stream: int) -> None:
        """Let a stream wait until the gather has ended, or `giving_up` is written."""
        self._words.wait(stream, _word(self._number, _ENDED), self._number)

    @property
    def awaited_end(self) -> tuple[int, int]:
        """The address of the word that reports the end, and its value after the end."""
        return self._words.address + _word(self._number, _ENDED) * _WORD_BYTES, self._number

    @property
    def digest(self) -> int:
        """The digest of the gathered bytes; valid after the end."""
        words = self._words.words
        return (words[_word(self._number, _TOTAL)] - words[_word(self._number, _BASE)]) & _MASK

    @property
    def giving_up(self) -> list[tuple[int, int]]:
        """The words that give up the signal, in the order in which to write them: addresses and values.

        The first stops the writer's signals, so a message follows when the gather ends. The second ends the wait of a stream.
        """
        return [(self._words.address + _IS_STOPPED * _WORD_BYTES, 1), self.awaited_end]

    def close(self) -> None:
        """Let the writer reuse the entry. Call this once, when no stream waits for the entry any more."""
        self._reader.close(self._number)
