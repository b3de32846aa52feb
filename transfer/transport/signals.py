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
6     writer's host  1 if the stream writes word 7, before word 0
7     stream         the number, once the first half of the gather has ended: of its buffers in the order of the wire,
                     ``len(buffers) // 2``; the target writes it, too, to give up the signal
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

LAYOUT: Final = 2
"""Version of the words. Both ends must use the same version."""

NUM_BYTES: Final = 8192
_WORD_BYTES: Final = 8
_ENTRY_WORDS: Final = 8  # a cache line
NUM_ENTRIES: Final = NUM_BYTES // (_WORD_BYTES * _ENTRY_WORDS) - 1
# As in transfer/receive/_signals.c.
_NUM_CLOSED, _IS_STOPPED = range(2)
_QUEUED, _GRANT, _BEGUN, _BASE, _TOTAL, _ENDED, _HAS_HALVES, _HALF_ENDED = range(8)


class DeviceWords(Protocol):
    """Words of host memory that streams of a device can use.

    Attributes:
        words: The memory as unsigned 64-bit numbers.
        address: Address of word 0.
        device_address: Its address for streams.
        context: Handle of the device's context.
        functions: Addresses of the driver's functions that queue a scatter, in the order of `transfer.receive._signals.Watch`.
    """

    @property
    def words(self) -> memoryview: ...

    @property
    def address(self) -> int: ...

    @property
    def device_address(self) -> int: ...

    @property
    def context(self) -> int: ...

    @property
    def functions(self) -> tuple[int, ...]: ...

    def write(self, stream: int, word: int, value: int) -> None:
        """Queue a write, which becomes visible after all earlier writes of the stream."""

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

    def begin(self, grant: int, stream: int, total: int, *, has_halves: bool = False) -> int:
        """Queue the words of an entry that precede the gather. Return its number, or 0 if no signal can be sent."""
        words = self._words.words
        if self.is_stopped or self._num_used - words[_NUM_CLOSED] >= NUM_ENTRIES:
            return 0
        self._num_used += 1
        number = self._num_used
        words[_word(number, _GRANT)] = grant
        words[_word(number, _HAS_HALVES)] = has_halves
        words[_word(number, _QUEUED)] = number
        self._words.copy(stream, _word(number, _BASE), total)
        self._words.write(stream, _word(number, _BEGUN), number)
        return number

    def end_half(self, number: int, stream: int) -> None:
        """Queue the word of the entry that follows the first half of the gather."""
        self._words.write(stream, _word(number, _HALF_ENDED), number)

    def end(self, number: int, stream: int, total: int) -> None:
        """Queue the words of the entry that follow the gather."""
        self._words.copy(stream, _word(number, _TOTAL), total)
        self._words.write(stream, _word(number, _ENDED), number)


class GatherSignal:
    """The signal of one gather. Call `begin` before the gather is queued, `end_half` between halves, and `end` after it.

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

    def begin(self, stream: int, total: int, *, has_halves: bool = False) -> None:
        self._number = self._writer.begin(self._grant, stream, total, has_halves=has_halves)

    def end_half(self, stream: int) -> None:
        if self._number:
            self._writer.end_half(self._number, stream)

    def end(self, stream: int, total: int) -> None:
        if self._number:
            self._writer.end(self._number, stream, total)


class SignalReader:
    """The target's end, which only offers the words: `transfer.receive.signal_watch` reads them.

    Attributes:
        words: The memory, which the writer also maps.
    """

    def __init__(self, words: DeviceWords) -> None:
        self.words = words

    def stop(self) -> None:
        """Make the writer send no signals."""
        self.words.words[_IS_STOPPED] = 1
