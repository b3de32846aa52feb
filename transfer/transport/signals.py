"""Signals: words in host memory by which a writer's stream reports that a gather into the target's ring begins and has ended.

Between two GPUs of one machine, the messages about a gather take longer than the gather. So the stream that gathers writes these
words itself, and the target's stream waits for them (docs/adr/0083-signals-of-the-writers-stream.md). A signal says the same as
`ChunkReady`. If one is missed, the message follows.

The memory belongs to the target, and both processes map it. It is a ring of entries, one for each gather, in the order of the
writer's stream:

====  =============  ==============================================================================================
word  written by     contains
====  =============  ==============================================================================================
0     writer's host  number of the entry, once its gather is queued: entries are numbered from 1
1     writer's host  position at which the gather's grant begins; names the grant
2     stream         the number, once the stream has reached the gather
3     stream         sum of the stream's digests before the gather
4     stream         the same after the gather: the difference is the digest
5     stream         the number, once the gather has ended; the target writes it to give a signal up
====  =============  ==============================================================================================

Entry 0 is not used for gathers. The target writes its words. Word 0 is the number of entries that it has closed. A writer uses an
entry again when the target has closed it, and sends no signal while all entries are in use, or once word 1 is not 0. Then the
target ignores also the signals that are on their way, and the writer sends messages for their gathers.
"""

from __future__ import annotations

from typing import Final, Protocol

SIGNAL_LIMIT_S: Final = 0.05
"""Time that a stream may wait for the end of a gather that runs. Meanwhile, calls of the process that wait for the whole device,
such as those that free memory, do not return (docs/adr/0083-signals-of-the-writers-stream.md)."""

SIGNAL_PAUSE_S: Final = 60.0
"""Time without signals after one was given up. A device that is always slow then costs one wait a minute."""

LAYOUT: Final = 1
"""Version of the words. Both ends need the same one."""

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
        """Return the signal of a gather that is about to be queued into the grant that begins at position `grant`."""
        return GatherSignal(self, grant)

    @property
    def is_stopped(self) -> bool:
        """Whether the target takes no more signals."""
        return self._words.words[_IS_STOPPED] != 0

    def begin(self, grant: int, stream: int, total: int) -> int:
        """Queue the first half of an entry. Return its number, or 0 if no signal can be sent."""
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
        """Queue the second half."""
        self._words.copy(stream, _word(number, _TOTAL), total)
        self._words.write(stream, _word(number, _ENDED), number)


class GatherSignal:
    """The signal of one gather. Call `begin` and `end` before and after the gather is queued.

    Args:
        stream, total: The stream, and the device address of the 64-bit sum of its digests.
    """

    def __init__(self, writer: SignalWriter, grant: int) -> None:
        self._writer = writer
        self._grant = grant
        self._number = 0

    @property
    def is_sent(self) -> bool:
        """Whether there was an entry for it, and the target still takes signals."""
        return self._number > 0 and not self._writer.is_stopped

    def begin(self, stream: int, total: int) -> None:
        self._number = self._writer.begin(self._grant, stream, total)

    def end(self, stream: int, total: int) -> None:
        if self._number:
            self._writer.end(self._number, stream, total)


class SignalReader:
    """The target's end. One thread calls `awaited` and `take`; the rest belongs to the owner of the session.

    Attributes:
        words: The memory that the writer maps, too.
        is_stopped: Whether signals are ignored from now on.
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
        """Whether the next gather is queued, behind a step of the engine at most. A grant can wait for far longer."""
        number = self._num_taken + 1
        return self.words.words[_word(number, _QUEUED)] == number

    @property
    def awaited(self) -> tuple[int, int] | None:
        """The address of the word that changes next, and its value then. None while all entries are in use, and after `stop`."""
        number = self._num_taken + 1
        field = _BEGUN if self.is_near else _QUEUED
        unused = self._is_full or self.is_stopped
        return None if unused else (self.words.address + _word(number, field) * _WORD_BYTES, number)

    @property
    def _is_full(self) -> bool:
        return self._num_taken - self._num_closed >= NUM_ENTRIES

    def take(self) -> list[ArrivalSignal]:
        """Return the signals of the gathers that have begun since the last call, in order.

        A writer that skips an entry is stopped. Otherwise the thread that waits for the entry would look without a pause.
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
        """Let the writer use an entry again. Entries can be closed in any order."""
        self._closed.add(number)
        while self._num_closed + 1 in self._closed:
            self._num_closed += 1
            self._closed.remove(self._num_closed)
        self.words.words[_NUM_CLOSED] = self._num_closed

    def stop(self) -> None:
        """Tell the writer to send no more signals, and ignore those that it sends all the same."""
        self.is_stopped = True
        self.words.words[_IS_STOPPED] = 1

    def resume(self) -> None:
        """Take signals again, unless the writer has broken a rule."""
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
        """Let a stream wait for the end of the gather, or until `giving_up` is written."""
        self._words.wait(stream, _word(self._number, _ENDED), self._number)

    @property
    def awaited_end(self) -> tuple[int, int]:
        """The address of the word that reports the end, and its value then."""
        return self._words.address + _word(self._number, _ENDED) * _WORD_BYTES, self._number

    @property
    def digest(self) -> int:
        """The digest of the gathered bytes; valid after the end."""
        words = self._words.words
        return (words[_word(self._number, _TOTAL)] - words[_word(self._number, _BASE)]) & _MASK

    @property
    def giving_up(self) -> list[tuple[int, int]]:
        """The words that give the signal up, in the order of their writes: addresses and values.

        The writer sends no more signals then, but a message when the gather ends. And the wait of a stream ends.
        """
        return [(self._words.address + _IS_STOPPED * _WORD_BYTES, 1), self.awaited_end]

    def end_wait(self) -> None:
        """End the wait of a stream, also if the writer has set the word back since it reported the end."""
        self._words.words[_word(self._number, _ENDED)] = self._number

    def close(self) -> None:
        """Let the writer use the entry again. Call it once, when no stream waits for it any more."""
        self._reader.close(self._number)
